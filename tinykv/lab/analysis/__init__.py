"""What the methods stand on, measured on any model and text: `python -m tinykv.lab.analysis WHAT`.

`walk.py` has the one loop of the measurements, and says what a phenomenon is; each is a file with its name: what is
measured, its table and its figure. `plots.py` has what figures share.
"""
