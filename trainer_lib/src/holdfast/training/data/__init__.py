"""The samples of a step: a pure function of (dataset, seed, cursor), independent of the world size."""

from holdfast.training.data.bad_samples import BadSample, BadSamples, Unreadable
from holdfast.training.data.cursor import BatchShare, Position, micro_batches, sample_at, share_of
from holdfast.training.data.permutation import Permutation
from holdfast.training.data.sample_audit import Audit, AuditResult, expected_audit
from holdfast.training.data.sample_range import SampleRange

__all__ = [
    "Audit",
    "AuditResult",
    "BadSample",
    "BadSamples",
    "BatchShare",
    "Permutation",
    "Position",
    "SampleRange",
    "Unreadable",
    "expected_audit",
    "micro_batches",
    "sample_at",
    "share_of",
]
