"""The operator of Holdfast: the sole authority on who is a member of a training job."""

__version__ = "0.1.0"
