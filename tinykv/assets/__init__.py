"""The embedded model, in Hugging Face format, and `make.py`, which makes it."""
