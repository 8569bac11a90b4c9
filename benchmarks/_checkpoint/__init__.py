"""Parts of `checkpoint.py`."""
