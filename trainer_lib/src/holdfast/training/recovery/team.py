"""The world in which a rank trains: its place, its process groups, and the attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.format.shard_layout import Holding
from holdfast.core.attempt import AttemptId
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.process_group import Group
from holdfast.training.launcher_client.placement import RankPlacement
from holdfast.training.protocol.shard_assignment import ShardAssignment
from holdfast.training.step.call_mismatch import Calls


@dataclass(frozen=True, kw_only=True)
class Team:
    """The world in which this rank trains."""

    place: RankPlacement
    group: Group
    cancel: CancelToken
    attempt: Attempt
    calls: Calls
    assignment: ShardAssignment | None = None
    """Which rank has which shard of the model, if the model is sharded."""
    peers: Group | None = None
    shard_group: Group | None = None

    @property
    def attempt_id(self) -> AttemptId:
        return self.attempt.attempt_id

    def abandon(self) -> None:
        for group in self._groups():
            group.abandon()

    def close(self) -> None:
        for group in self._groups():
            group.close()

    def outlive(self) -> None:
        """Keep all groups until the process exits."""
        for group in self._groups():
            group.outlive()

    def sharing(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that have, or will have, the same state as this rank."""
        assignment, own = self.assignment, self.group.rank
        return [rank for rank in ranks if assignment is None or assignment.shards[rank] == assignment.shards[own]]

    def holding(self, names: Iterable[str]) -> Holding | None:
        """Return which rank holds which of the named tensors, for a checkpoint."""
        assignment = self.assignment
        return (
            None
            if assignment is None
            else Holding(names=frozenset(names), size=assignment.size, shards=assignment.shards)
        )

    def _groups(self) -> list[Group]:
        return [group for group in (self.peers, self.shard_group, self.group) if group is not None]
