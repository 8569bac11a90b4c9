"""The samples of a step: a pure function of (dataset, seed, cursor), independent of the world size."""

from holdfast.training.data.cursor import BatchShare, Position, micro_batches, sample_at, share_of
from holdfast.training.data.permutation import Permutation
from holdfast.training.data.sample_audit import Audit, expected_audit

__all__ = [
    "Audit",
    "BatchShare",
    "Permutation",
    "Position",
    "expected_audit",
    "micro_batches",
    "sample_at",
    "share_of",
]
