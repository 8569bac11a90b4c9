"""The state of the job."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_operator.decision.reporting.messages.common import count


def no_recovery() -> str:
    return "No recovery in progress"


def all_training() -> str:
    return "All requested workers are training"


def training(workers: int, requested: int, *, launched: bool) -> str:
    verb = _verb(launched=launched)
    if workers > requested:
        return f"{workers} workers {verb} ({requested} requested)"
    return f"{workers} of {requested} workers {verb}"


def fewer_training(workers: int, requested: int, *, launched: bool) -> str:
    return f"{workers} of {requested} workers {_verb(launched=launched)}; replacements are on the way"


def _verb(*, launched: bool) -> str:
    """Return the verb: only Holdfast's launchers report whether the workers train."""
    return "are training" if launched else "are running"


def starting(phases: Sequence[str]) -> str:
    return "Workers are starting" + (f"; launchers report {'; '.join(phases)}" if phases else "")


def slow_rank(rank: int, where: str, *, seconds: float, median: float, activity: str) -> str:
    return (
        f"rank {rank} ({where}) uses {seconds:.3g} s per step for itself, mostly for {activity} "
        f"(the median rank uses {median:.3g} s)"
    )


def slow_ranks(named: Sequence[str], others: int) -> str:
    more = f"; {others} more are slow" if others else ""
    return f"Training waits for slow ranks: {'; '.join(named)}{more}"


def recovering() -> str:
    return "Workers are forming the next world"


def spares_ready(ready: int, spares: int) -> str:
    return f"{ready} of {spares} spares are on standby"


def no_shared_tier() -> str:
    return "neither checkpoint.volume nor checkpoint.object is set; checkpoints are lost with the pods"


def invalid_spec(detail: str) -> str:
    return f"Spec not understood by this operator version: {detail}"


def unsuspended() -> str:
    return "The job is no longer suspended"


def suspended() -> str:
    return "The job is suspended"


def deadline_exceeded(seconds: int) -> str:
    return f"The job was active for {seconds} s (activeDeadlineSeconds)"


def completed(step: int | None) -> str:
    return "Training is complete" + (f" at step {step}" if step is not None else "")


def checkpoint_quarantined(path: str, reason: str) -> str:
    return f"Checkpoint {path} is corrupt and was set aside: {reason}"


def replica_repaired(rank: int, node: str, step: int, tensor: str) -> str:
    return (
        f"At step {step}, the state of rank {rank} on node {node} differed from that of most replicas, first in "
        f"{tensor}; the rank received their state"
    )


def no_majority_of_replicas(step: int, tensor: str) -> str:
    return (
        f"At step {step}, the replicas differed, first in {tensor}, and no state had a majority; if they were equal "
        "before, training restarts from the newest checkpoint, otherwise it continues"
    )


def no_recent_divergence() -> str:
    return "No replica has differed from the others for a day"


def repeated_divergence(node: str, times: int, hours: int, *, elsewhere: bool) -> str:
    told = f"Ranks on node {node} held a wrong state {count(times, 'time')} within {hours} h"
    if not elsewhere:
        return f"{told}; the job still uses the node because no other node has capacity"
    return f"{told}; the job places no new worker there for {hours} h"
