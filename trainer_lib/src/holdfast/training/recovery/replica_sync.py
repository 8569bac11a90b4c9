"""Compare the replicas of the current world between two steps, and give the same state to all of them.

All ranks make the same calls. A world that ends meanwhile loses nothing: a rank that differs is marked as a newcomer
before it receives another state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from holdfast.core.errors import CorruptCheckpointError, PeerLostError, ReplicaError
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.protocol import step_commit
from holdfast.training.recovery import state_transfer
from holdfast.training.recovery.replica_digest import (
    ReplicaReport,
    combined,
    compare,
    first_difference,
    tensor_digests,
)
from holdfast.training.recovery.team import Team
from holdfast.training.step.stepper import Stepper
from holdfast.training.step.train_state import TrainState

_log = logging.getLogger("holdfast.job")
_NEVER_EQUAL: Final = (
    "no comparison found equal replicas, so training continues. Different processors, or a script that changes "
    "weights on some ranks, are the likely cause. Make the ranks alike, or use holdfast.Guards(replica_check_steps=0)"
)


class ReplicaSync:
    """Compares and synchronises the state of this rank with that of the other ranks of a world."""

    def __init__(self, agent: LauncherConnection, state: TrainState, stepper: Stepper, *, steps: int) -> None:
        self._agent = agent
        self._steps = steps  # of the period; 0 without
        self._were_equal = False  # in some comparison, of this process or another rank's
        self._state = state
        self._stepper = stepper

    def due(self, team: Team, *, saves: bool) -> bool:
        """Return whether all ranks compare their replicas after the present step. `saves`: a checkpoint follows."""
        replicas = team.group.size if team.assignment is None else team.group.size // team.assignment.size
        return self._steps > 0 and replicas > 1 and (saves or self._state.step % self._steps == 0)

    def check(self, team: Team) -> None:
        """Compare the replicas, and repair those that differ.

        Without a majority, the job fails only if the replicas were equal before. Otherwise, other processors or the
        script are the likely cause, and a restart would not help.
        """
        report = self.verify(team, all_of_module=False)
        if report.majority or self._were_equal:
            self.repair(team, report)
        elif team.group.rank == 0:
            _log.warning("%s", _NEVER_EQUAL)

    def verify(self, team: Team, *, all_of_module: bool = True) -> ReplicaReport:
        """Compare the weights and the optimizer state of all replicas.

        Log a difference. Each rank that differs reports it to its launcher; without a majority, only the first one.
        """
        own = tensor_digests(self._state.objects, all_of_module=all_of_module)
        answers = team.group.gather([combined(own), self._were_equal])
        digests = [digest for digest, _ in answers]
        self._were_equal = any(equal for _, equal in answers)
        shards = [0] * team.group.size if team.assignment is None else list(team.assignment.shards)
        differing, majority = compare(digests, shards)
        if not differing:
            self._were_equal = True
            return ReplicaReport(step=self._state.step)
        tensor = first_difference(team.group.gather(own), shards, differing)
        report = ReplicaReport(step=self._state.step, differing=differing, majority=majority, tensor=tensor)
        _log.error("%s", report)
        if team.group.rank in (differing if majority else differing[:1]):
            self._agent.send(
                "diverged", step=report.step, ranks=list(differing), majority=majority, tensor=report.tensor
            )
        return report

    def repair(self, team: Team, report: ReplicaReport) -> None:
        """Give the ranks that differ the state of the majority. Raise `ReplicaError` if there is none."""
        if report.equal:
            return
        if not report.majority:
            self._state.diverged = True
            raise ReplicaError(
                f"{report}, and no state has a majority. A restart continues from the newest checkpoint, step "
                f"{self._state.saved_step}. If this repeats, run the job without these ranks' nodes"
            )
        self.synchronize(team, report.differing)

    def synchronize(self, team: Team, takers: Sequence[int]) -> None:
        """Give these ranks the state of the other ranks that hold the same shard.

        Nothing changes on the others, nor for a shard that only takers hold.
        """
        group, state = team.group, self._state
        others = [rank for rank in range(group.size) if rank not in takers]
        donors, takers = team.sharing(others), team.sharing(takers)
        if takers and group.rank in donors:
            state_transfer.send(group, takers, donors, state.flat(), state.side())
        elif donors and group.rank in takers:
            self._receive(team, donors)
        group.barrier()
        self._stepper.begin()

    def _receive(self, team: Team, donors: Sequence[int]) -> None:
        state, before = self._state, self._state.rank_state
        self._stepper.settle(step_commit.invalidated(before), apply=False)
        try:
            received = state_transfer.receive(team.group, donors, state_transfer.ReceiveBuffers())
        except CorruptCheckpointError as error:
            raise PeerLostError(f"the state of another replica arrived corrupt: {error}") from error
        state.load_from_peer(*received)
        state.rank_state = before
        self._stepper.weights.remember()
        _log.warning("rank %d took the state of step %d from rank %d", team.group.rank, state.step, donors[0])
