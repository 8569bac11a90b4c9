"""The operator of Holdfast, which alone decides about the membership of training jobs."""

__version__ = "0.1.0"
