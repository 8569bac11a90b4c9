"""The ranks of one job as the protocol of one step sees them.

The production rules of `holdfast.training.protocol.step_commit` drive them. Simulated collectives do what real ones
can do at most: a vote or an average completes at a member only if every member launched it, and can then still fail
at any member. A process may be killed at any point. A process that is left out of a world continues as a stale one
until it is killed or admitted again. A state is the list of the averages applied to it, each named by its attempt and
step, so that equal lists mean equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from holdfast.core.attempt import AttemptId
from holdfast.training.protocol.step_commit import (
    RankState,
    Resolution,
    committed,
    invalidated,
    prepared,
    resolve,
    synchronised,
    voted,
)

Averages = tuple[AttemptId, int]
State = tuple[Averages, ...]


class ViolationError(AssertionError):
    """The invariant of the protocol does not hold."""


@dataclass(frozen=True, kw_only=True)
class WeakenedRules:
    """Rules to leave out, to show that each is needed."""

    vote: bool = False
    synced_mark: bool = False
    voted_mark: bool = False
    doubts_with_unequal_marks: bool = False
    leave_before_showing: bool = False
    settle_and_mark_as_one: bool = False
    keep_until_all_arrived: bool = False


NOTHING = WeakenedRules()


@dataclass(eq=False)
class Process:
    """A rank process. `kept` are its prepared averages, and `attempts` are those whose state it had."""

    number: int
    rank_state: RankState = RankState()  # noqa: RUF009  (frozen)
    state: State = ()
    kept: Averages | None = None
    attempt: AttemptId | None = None
    broken: bool = False
    alive: bool = True
    attempts: frozenset[AttemptId] = frozenset()

    def tear(self) -> None:
        """Mark the state as half changed."""
        self.rank_state, self.state, self.kept, self.attempts = invalidated(self.rank_state), (), None, frozenset()


@dataclass(eq=False)
class Attempt:
    """A world, and what its members launched. `base` is the state that its verdict names.

    A member may have left before the last one reported its rank state, so `shown` has the process at the time of its
    report.
    """

    attempt_id: AttemptId
    members: tuple[Process, ...]
    shown: dict[Process, Process] = field(default_factory=dict)
    averaged: dict[int, set[Process]] = field(default_factory=dict)
    votes: dict[int, set[Process]] = field(default_factory=dict)
    verdict: Resolution | None = None
    base: State = ()
    lived_through: frozenset[AttemptId] = frozenset()
    committed: set[Averages] = field(default_factory=set)

    @property
    def voted(self) -> bool:
        """Return whether a member launched a vote."""
        return any(self.votes.values())


class Steps:
    """All processes and attempts of a job. A method that does not apply does nothing. `check` follows each method."""

    def __init__(self, ranks: int, weakened: WeakenedRules = NOTHING) -> None:
        self.weakened = weakened
        self.processes: list[Process] = []
        self.attempts: dict[AttemptId, Attempt] = {}
        for _ in range(ranks):
            self.new_process()

    def new_process(self) -> Process:
        """Add a rank process without a state."""
        self.processes.append(Process(len(self.processes)))
        return self.processes[-1]

    def alive(self) -> list[Process]:
        """Return the running processes, including stale ones."""
        return [process for process in self.processes if process.alive]

    # Worlds

    def open(self, members: Iterable[Process], *, generation: bool = False) -> Attempt:
        """Form the next world of the launchers."""
        last = max(self.attempts, default=AttemptId(1, 0))
        attempt_id = AttemptId(last.generation + 1, 1) if generation else AttemptId(last.generation, last.attempt + 1)
        self.attempts[attempt_id] = Attempt(attempt_id, tuple(members))
        return self.attempts[attempt_id]

    def enter(self, process: Process, attempt: Attempt) -> None:
        """Let a member leave every lower attempt and report its rank state."""
        if process.alive and process in attempt.members and (process.attempt or AttemptId(0, 0)) < attempt.attempt_id:
            process.attempt, process.broken = attempt.attempt_id, False
            attempt.shown[process] = replace(process)
            if len(attempt.shown) == len(attempt.members):
                self._decide(attempt)

    def _decide(self, attempt: Attempt) -> None:
        shown = [attempt.shown[member] for member in attempt.members]
        attempt.verdict = verdict = resolve([self._weak(one.rank_state) for one in shown])
        states = {self._after(shown[rank], verdict) for rank in verdict.survivors}
        if len(states) > 1:
            raise ViolationError(f"survivors of {attempt.attempt_id} have different states: {states}")
        attempt.base = states.pop() if states else ()
        if len(attempt.base) != verdict.step:
            raise ViolationError(f"{attempt.attempt_id} goes on from step {verdict.step} with {attempt.base}")
        attempt.lived_through = frozenset().union(*(one.attempts for one in shown))

    def _weak(self, rank_state: RankState) -> RankState:
        if self.weakened.synced_mark:
            return replace(rank_state, synced=rank_state.voted)
        if self.weakened.voted_mark:
            return replace(rank_state, voted=rank_state.synced)
        return rank_state

    def _after(self, survivor: Process, verdict: Resolution) -> State:
        apply = verdict.apply and survivor.kept is not None and self._weak(survivor.rank_state).in_doubt
        return (*survivor.state, survivor.kept) if apply and survivor.kept else survivor.state

    def settle(self, process: Process, *, mark: bool = True) -> None:
        """Let a survivor apply or discard its prepared step, and mark it as synchronised."""
        attempt = self._entered(process)
        if attempt and attempt.verdict and attempt.members.index(process) in attempt.verdict.survivors:
            if process.state != attempt.base:
                self._apply(process, attempt.base[-1])
            if self.weakened.settle_and_mark_as_one and not mark:
                process.rank_state = replace(process.rank_state, step=len(process.state), prepared_step=None)
            else:
                self._synchronise(process, attempt, attempt.verdict)

    def copy(self, process: Process, *, tears: bool = False) -> None:
        """Let a new member copy the state of a synchronised survivor, or the initial state."""
        attempt = self._entered(process)
        if not (attempt and attempt.verdict and attempt.members.index(process) in attempt.verdict.newcomers):
            return
        donors = [attempt.members[rank] for rank in attempt.verdict.survivors]
        ready = [
            d
            for d in donors
            if d.alive and d.attempt == attempt.attempt_id and d.rank_state.synced == attempt.attempt_id
        ]
        if donors and not ready:
            if self.weakened.keep_until_all_arrived:
                lived_through = process.attempts
                process.tear()
                process.attempts = lived_through
            return
        process.tear()
        if not tears:
            process.state = attempt.base
            self._synchronise(process, attempt, attempt.verdict)

    def _entered(self, process: Process) -> Attempt | None:
        """Return the attempt that the process has entered without its common state."""
        if (
            not process.alive
            or process.broken
            or process.attempt is None
            or process.rank_state.synced == process.attempt
        ):
            return None
        return self.attempts[process.attempt]

    def _synchronise(self, process: Process, attempt: Attempt, verdict: Resolution) -> None:
        stale = process.rank_state.prepared_step
        before = self._weak(process.rank_state)
        process.rank_state = synchronised(before, attempt.attempt_id, verdict.step, verdict.voted)
        process.attempts |= {attempt.attempt_id}
        if self.weakened.doubts_with_unequal_marks:
            process.rank_state = replace(process.rank_state, prepared_step=stale)
        else:
            process.kept = None

    # A step

    def training(self, process: Process) -> Attempt | None:
        """Return the attempt in which the process is training."""
        if not process.alive or process.broken or process.rank_state.synced is None:
            return None
        if process.rank_state.synced != process.attempt and not self.weakened.leave_before_showing:
            return None
        return self.attempts[process.rank_state.synced]

    def average(self, process: Process) -> None:
        """Launch the averages of the next step of a process."""
        attempt = self.training(process)
        if attempt and not self._prepared(process):
            attempt.averaged.setdefault(process.rank_state.step, set()).add(process)

    def prepare(self, process: Process) -> None:
        """Complete all averages of a process."""
        attempt, step = self.training(process), process.rank_state.step
        if attempt and not self._prepared(process) and attempt.averaged.get(step) == set(attempt.members):
            process.rank_state = prepared(replace(process.rank_state, prepared_step=None), attempt.attempt_id)
            process.kept = (attempt.attempt_id, step)
            if self.weakened.vote:
                process.rank_state = replace(process.rank_state, voted=attempt.attempt_id)
                self._commit(process)

    def vote(self, process: Process) -> None:
        """Launch the vote of a process."""
        attempt, step = self.training(process), process.rank_state.step
        if attempt and self._prepared(process):
            process.rank_state = voted(process.rank_state, attempt.attempt_id)
            attempt.votes.setdefault(step, set()).add(process)

    def vote_returns(self, process: Process, *, tears: bool = False) -> None:
        """Complete the vote of a process. The optimizer may raise."""
        attempt, step = self.training(process), process.rank_state.step
        if not (attempt and attempt.votes.get(step) == set(attempt.members)):
            return
        if tears:
            process.tear()
            process.broken = True
        else:
            self._commit(process)

    def _commit(self, process: Process) -> None:
        if process.kept is None:
            raise ViolationError(f"process {process.number} has nothing to apply")
        attempt = self.attempts[process.kept[0]]
        attempt.committed |= {*attempt.base, process.kept}
        self._apply(process, process.kept)
        process.rank_state, process.kept = committed(process.rank_state), None

    def _apply(self, process: Process, averages: Averages) -> None:
        if averages in process.state or averages[1] != len(process.state):
            raise ViolationError(
                f"process {process.number} applies {averages} twice or out of order: {process.state}"
            )
        process.state = (*process.state, averages)

    def _prepared(self, process: Process) -> bool:
        prepared_step = process.rank_state.prepared_step
        return (
            prepared_step is not None
            and prepared_step.attempt_id == process.rank_state.synced
            and prepared_step.step == process.rank_state.step
        )

    # Faults

    def kill(self, process: Process) -> None:
        """Kill a process. The operations that it launched stay launched."""
        process.alive = False

    def fail(self, process: Process) -> None:
        """Let a collective fail at a process, which then takes no further part in its attempt."""
        process.broken = True

    # Invariants

    def check(self) -> None:
        """Check the invariant for everything that happened so far."""
        for attempt in self.attempts.values():
            if attempt.verdict is not None:
                self._nothing_lost(attempt)
        for process in self.alive():
            for other in self.alive():
                if process.rank_state.synced is not None and process.rank_state.synced == other.rank_state.synced:
                    self._same(process, other)

    def _nothing_lost(self, attempt: Attempt) -> None:
        """Check that every world has the steps completed in any attempt that one of its members was part of."""
        for attempt_id in attempt.lived_through:
            lost = self.attempts[attempt_id].committed - set(attempt.base)
            for averages in lost if attempt_id < attempt.attempt_id else ():
                if not self._overtaken(averages, attempt_id, attempt.attempt_id):
                    raise ViolationError(f"{averages} is committed, and {attempt.attempt_id} goes on without it")

    def _overtaken(self, averages: Averages, after: AttemptId, before: AttemptId) -> bool:
        """Return whether a world without these averages has voted between the two attempts."""
        between = (other for other in self.attempts.values() if after < other.attempt_id < before)
        return any(other.voted and averages not in other.base for other in between)

    @staticmethod
    def _same(one: Process, other: Process) -> None:
        shorter, longer = sorted((one.state, other.state), key=len)
        if longer[: len(shorter)] != shorter or len(longer) > len(shorter) + 1:
            raise ViolationError(f"two states of {one.rank_state.synced}: {one.state} and {other.state}")
