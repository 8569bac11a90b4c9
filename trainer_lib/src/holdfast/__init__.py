"""Holdfast: PyTorch training that goes on when processes, pods and nodes do not.

    import holdfast

    job = holdfast.init()
    job.manage(model=model, optimizer=optimizer)
    for batch in job.batches(dataset, global_batch_size=256, micro_batch_size=8, max_steps=10_000):
        job.step(loss_fn(model, batch))

Importing this package is cheap; torch comes with `init`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.core.errors import (
    BadSampleError,
    CheckpointError,
    ClaimError,
    CorruptCheckpointError,
    DataError,
    ForeignClaimError,
    HoldfastError,
    LaunchError,
    NonFiniteError,
    PeerLostError,
    ReplicaError,
    StateError,
    UnknownFormatError,
    UsageError,
)

if TYPE_CHECKING:
    from holdfast.training.data import AuditResult
    from holdfast.training.guards.settings import Guards
    from holdfast.training.init import init
    from holdfast.training.job import Job
    from holdfast.training.options.elasticity import Elasticity
    from holdfast.training.recovery.replica_digest import ReplicaReport
    from holdfast.training.step.step_result import StepResult
    from holdfast.training.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "AuditResult",
    "BadSampleError",
    "CheckpointError",
    "ClaimError",
    "CorruptCheckpointError",
    "DataError",
    "Elasticity",
    "ForeignClaimError",
    "Guards",
    "HoldfastError",
    "Job",
    "LaunchError",
    "NonFiniteError",
    "PeerLostError",
    "ReplicaError",
    "ReplicaReport",
    "StateError",
    "StepResult",
    "Trainer",
    "UnknownFormatError",
    "UsageError",
    "init",
]

_FROM_JOB = frozenset({"AuditResult", "Job", "ReplicaReport", "StepResult"})


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for: the launcher never does."""
    if name == "init":
        from holdfast.training.init import init

        return init
    if name == "Elasticity":
        from holdfast.training.options.elasticity import Elasticity

        return Elasticity
    if name == "Guards":
        from holdfast.training.guards.settings import Guards

        return Guards
    if name == "Trainer":
        from holdfast.training.trainer import Trainer

        return Trainer
    if name in _FROM_JOB:
        from holdfast.training import job

        return getattr(job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
