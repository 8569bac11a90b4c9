"""The reports of ranks that enter a new world, and the decision whose state they continue from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from holdfast.checkpoint.policy import fencing
from holdfast.core.attempt import AttemptId
from holdfast.core.json_fields import JsonFields
from holdfast.training.guards.non_finite import RollBack
from holdfast.training.guards.out_of_memory import OutOfMemory, latest
from holdfast.training.protocol import shard_assignment, step_commit
from holdfast.training.protocol.random_streams import Seeds, Streams
from holdfast.training.protocol.shard_assignment import ShardAssignment
from holdfast.training.protocol.step_commit import RankState, Resolution


@dataclass(frozen=True, kw_only=True)
class EntryReport(JsonFields):
    """One rank's report of its state when it enters a world."""

    rank_state: RankState
    outline: str
    """The digest of the outline of the rank's model."""
    seeds: Seeds
    """The seeds of the rank's random generators, from the states in which the script left them at `job.manage`."""
    claimed: int | None = None
    """The generation whose claim the rank knows to be durable."""
    saved_step: int = 0
    """The last step that the rank knows to be durable."""
    trained: AttemptId | None = None
    """The highest earlier attempt in which the rank's launcher had ranks."""
    shard: int | None = None
    """The shard that the rank holds, if the model is sharded."""
    roll_back: RollBack | None = None
    """The roll-back that the ranks of the last attempt decided on. The rank then reports no state in memory."""
    out_of_memory: OutOfMemory = OutOfMemory()  # noqa: RUF009  (frozen)


@dataclass(frozen=True, kw_only=True)
class EntryPlan:
    """Whose state a world continues from; the same on each of its ranks."""

    resolution: Resolution
    seeds: Streams
    """The seeds of all ranks, for a job that starts."""
    assignment: ShardAssignment | None = None
    """Which rank gets which shard, if the model is sharded."""
    claimed: bool = False
    """Whether the claim of the generation covers this state, so that the attempt writes none."""
    saved_step: int = 0
    """The last step that all survivors know to be durable; 0 without survivors."""
    roll_back: RollBack | None = None
    """The roll-back that the restore carries out. None if a rank still has the state: it did not decide on it."""
    out_of_memory: OutOfMemory = OutOfMemory()  # noqa: RUF009  (frozen)
    """The newest record of all ranks. Each of them adopts it, whatever state it continues from."""

    @property
    def depends_on_newest(self) -> bool:
        """Whether a checkpoint that is newer than any memory would change the plan."""
        return self.resolution.donor is not None and not self.claimed


def decide(
    reports: Sequence[EntryReport], attempt_id: AttemptId, *, shards: int | None, newest: AttemptId | None = None
) -> EntryPlan:
    """Decide from all ranks' reports, in order of their ranks in the world of attempt `attempt_id`.

    `shards` is the number of shards of the model, if it is sharded. `newest` is the attempt of the newest readable
    checkpoint. Find it only if the plan without it `depends_on_newest`.
    """
    states = [report.rank_state for report in reports]
    resolution, assignment = step_commit.resolve(states, newest), None
    if shards is not None:
        held = [report.shard for report in reports]
        resolution, assignment = shard_assignment.resolve(states, held, shards, newest)
    survivors = [reports[rank] for rank in resolution.survivors]
    return EntryPlan(
        resolution=resolution,
        seeds=Streams(ranks=tuple(report.seeds for report in reports)),
        assignment=assignment,
        claimed=fencing.inherits(
            attempt_id,
            synced=None if resolution.donor is None else states[resolution.donor].synced,
            claimed=[survivor.claimed for survivor in survivors],
            trained=[report.trained for report in reports],
        ),
        saved_step=min((survivor.saved_step for survivor in survivors), default=0),
        roll_back=next((one.roll_back for one in reports if one.roll_back), None) if not survivors else None,
        out_of_memory=reduce(latest, (report.out_of_memory for report in reports)),
    )


def odd_model(reports: Sequence[EntryReport], rank: int) -> int | None:
    """Return the rank whose model is the reference, if this rank must leave because the ranks' models differ.

    Once ranks have trained, only ranks with a different model leave. A rank that joins with another model is then
    lost, and costs the others another attempt.
    """
    if len({report.outline for report in reports}) == 1:
        return None
    trained = [other for other, report in enumerate(reports) if report.rank_state.voted is not None]
    if not trained:
        return 0
    return trained[0] if reports[rank].outline != reports[trained[0]].outline else None
