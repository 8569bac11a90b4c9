"""Which samples a step is made of: a pure function of (dataset, seed, cursor), whatever the world's size."""

from holdfast.data.audit import Audit, expected_audit
from holdfast.data.cursor import Position, Share, micro_batches, sample_at, share_of
from holdfast.data.permutation import Permutation

__all__ = ["Audit", "Permutation", "Position", "Share", "expected_audit", "micro_batches", "sample_at", "share_of"]
