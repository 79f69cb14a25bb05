"""`python -m tinykv` is `python eval_ppl.py`."""
from eval_ppl import main

main()
