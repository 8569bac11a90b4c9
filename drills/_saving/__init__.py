"""The parts of `drills/checkpoint.py`."""
