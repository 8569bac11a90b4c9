"""The two-phase commit of one step, and the decision which state continues after a failure. Pure.

A step has three phases. First, the averages of all members arrive without error: the step is **prepared**. Second,
all members vote. Third, the optimizer applies the step: it is **completed** (`committed` in the code). If a vote
returns, every member has started it. A rank whose vote failed cannot know whether it returned on another rank. Its
prepared step is **in doubt**: the rank keeps its averages until the members of a later attempt have compared their
rank states (`resolve`).

A rank state has two marks. `synced` is the last attempt whose common state the rank took over. `voted` is the last
attempt in which a vote was taken on that state, on this rank or on the rank that it came from. The state with the
highest marks (voted, then synced) continues. All ranks with equal marks are **survivors**: they began from one state,
and lack at most the last step of `voted`. A prepared step counts only while both marks name its attempt: a later
synchronisation has resolved it.

**Invariant.** If the vote on (a, s) returned on any process, including one that has exited, every member of *a* was
prepared for it. Every survivor of *a* then holds identical averages and applies them. If any survivor was not
prepared, the vote returned on no process, and all survivors discard the step. No step whose vote returned is
therefore lost while one member of its attempt survives. No step is applied twice, and all survivors have the same
state.

A step in doubt that survivors apply is equally safe once the next vote has returned. If all of them exit before,
other ranks continue from the step before it, and repeat it. No checkpoint has the step at that time, because a
checkpoint needs all ranks. A rank then reports the step to its launcher twice.

Callers must ensure four conditions. A member that has sent its rank state to a later attempt does not vote in an
earlier one. `voted` is set before the vote starts. A newcomer keeps its own state and marks until it has received a
complete other state. A state that is partly changed is marked with `invalidated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.attempt import AttemptId, Json
from holdfast.core.errors import DocumentError, InvariantError


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A step after `step` that was prepared in `attempt_id`. Averages and ballot are kept, and nothing is applied."""

    attempt_id: AttemptId
    step: int

    def to_json(self) -> dict[str, Any]:
        return {"pair": self.attempt_id.to_json(), "step": self.step}

    @classmethod
    def from_optional(cls, value: Json | None) -> PreparedStep | None:
        """Parse the wire form, which may be null."""
        return None if value is None else cls(attempt_id=AttemptId.from_json(value["pair"]), step=int(value["step"]))


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The part of a rank's state that other ranks see. Without a vote, the rank is a newcomer."""

    step: int = 0
    voted: AttemptId | None = None
    synced: AttemptId | None = None
    prepared_step: PreparedStep | None = None

    @property
    def in_doubt(self) -> bool:
        """Whether the prepared step counts: it is the next step of the attempt of both marks."""
        if self.prepared_step is None or self.synced is None or self.voted != self.synced:
            return False
        return self.prepared_step == PreparedStep(attempt_id=self.synced, step=self.step)

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "voted": None if self.voted is None else self.voted.to_json(),
            "synced": None if self.synced is None else self.synced.to_json(),
            "doubt": None if self.prepared_step is None else self.prepared_step.to_json(),
        }

    @classmethod
    def from_json(cls, value: Json) -> RankState:
        try:
            return cls(
                step=int(value["step"]),
                voted=AttemptId.from_optional(value["voted"]),
                synced=AttemptId.from_optional(value["synced"]),
                prepared_step=PreparedStep.from_optional(value["doubt"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentError(f"not a rank state: {value!r}") from error


# Transitions of a state


def prepared(rank_state: RankState, attempt_id: AttemptId) -> RankState:
    """Record that all averages of the next step arrived without error and are kept."""
    _need(rank_state.synced == attempt_id, rank_state, f"prepares in {attempt_id}")
    _need(rank_state.prepared_step is None, rank_state, "prepares while it is in doubt")
    return replace(rank_state, prepared_step=PreparedStep(attempt_id=attempt_id, step=rank_state.step))


def voted(rank_state: RankState, attempt_id: AttemptId) -> RankState:
    """Record that the vote starts next."""
    _need(rank_state.synced == attempt_id, rank_state, f"votes in {attempt_id}")
    _need(
        rank_state.prepared_step == PreparedStep(attempt_id=attempt_id, step=rank_state.step),
        rank_state,
        "votes without being prepared",
    )
    return replace(rank_state, voted=attempt_id)


def committed(rank_state: RankState) -> RankState:
    """Record that the vote returned and the kept averages are applied."""
    _need(rank_state.in_doubt, rank_state, "applies a step that it did not vote on")
    return replace(rank_state, step=rank_state.step + 1, prepared_step=None)


def synchronised(rank_state: RankState, attempt_id: AttemptId, step: int, voted: AttemptId | None) -> RankState:
    """Record that this rank has the common state of `attempt_id`. `step` and `voted` come from the resolution.

    This resolves a survivor's prepared step: its averages were applied or discarded before, as the resolution
    requires. Both are one change, because an applied step with the old marks would contradict a survivor that was not
    prepared. A newcomer has abandoned its own state with `invalidated` before another one replaced it. For a
    checkpoint or a fresh start, `step` is its step and `voted` is None.
    """
    _need(rank_state.synced is None or rank_state.synced < attempt_id, rank_state, f"synchronises in {attempt_id}")
    _need(voted is None or voted < attempt_id, rank_state, f"takes over the votes of {voted} in {attempt_id}")
    if rank_state.voted is not None or rank_state.synced is not None:
        mine = {rank_state.step, rank_state.step + rank_state.in_doubt}
        _need(rank_state.voted == voted and step in mine, rank_state, f"takes step {step} of {voted} for its own")
    return RankState(step=step, voted=voted, synced=attempt_id)


def affirmed(rank_state: RankState, attempt_id: AttemptId) -> RankState:
    """Record that an empty vote on the common state of `attempt_id` starts next. A step in doubt that was applied may
    then be saved.

    Until a vote in `attempt_id`, a rank outside it that has the marks of the previous attempt could continue without
    the step.
    """
    _need(rank_state.synced == attempt_id and rank_state.prepared_step is None, rank_state, f"affirms {attempt_id}")
    return replace(rank_state, voted=attempt_id)


def invalidated(rank_state: RankState) -> RankState:
    """Record that the state was partly changed or is lost, so that the rank can only return as a newcomer."""
    return replace(rank_state, step=0, voted=None, synced=None, prepared_step=None)


# The state that continues


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The state that a new world continues from, which is the same on each of its ranks.

    `survivors` have it, `donor` is the lowest of them, and `newcomers` need it. With `apply`, survivors in doubt
    apply their kept averages; otherwise they discard them. `step` is the completed step after that. Without survivors
    (`donor` is None), the world continues from the newest readable checkpoint, or starts from the beginning.
    """

    survivors: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()
    donor: int | None = None
    apply: bool = False
    step: int = 0
    voted: AttemptId | None = None
    message: str = ""


def resolve(rank_states: Sequence[RankState], commit: AttemptId | None = None) -> Resolution:
    """Decide from all ranks' states, in order of their ranks in the new world.

    `commit` is the attempt ID of the newest readable checkpoint. If it is above the votes of all states in memory,
    the checkpoint continues instead of them.
    """
    marks = max((_marks(rank_state) for rank_state in rank_states if rank_state.voted is not None), default=None)
    everyone = range(len(rank_states))
    if marks is None:
        return Resolution(newcomers=tuple(everyone), message="no rank has a state in memory")
    if commit is not None and commit > marks[0]:
        return Resolution(newcomers=tuple(everyone), message=f"a checkpoint of {commit} is newer than any memory")
    survivors = tuple(rank for rank in everyone if _marks(rank_states[rank]) == marks)
    newcomers = tuple(rank for rank in everyone if rank not in survivors)
    apply, step = _settle([rank_states[rank] for rank in survivors])
    return Resolution(
        survivors=survivors,
        newcomers=newcomers,
        donor=survivors[0],
        apply=apply,
        step=step,
        voted=rank_states[survivors[0]].voted,
        message=_message(survivors, newcomers, step, [rank_states[rank].in_doubt for rank in survivors], apply),
    )


def _marks(rank_state: RankState) -> tuple[AttemptId, AttemptId]:
    """Return the marks, by which states are ordered. A state without any vote is below all others."""
    return rank_state.voted or _LOWEST, rank_state.synced or _LOWEST


_LOWEST = AttemptId(-1, -1)


def _settle(survivors: Sequence[RankState]) -> tuple[bool, int]:
    """Return whether the survivors in doubt apply their step, and the survivors' step after that."""
    before = min(rank_state.step for rank_state in survivors)
    after = max(rank_state.step for rank_state in survivors)
    apply = any(rank_state.in_doubt for rank_state in survivors) and all(
        rank_state.in_doubt or rank_state.step == before + 1 for rank_state in survivors
    )
    if after > before + apply or any(rank_state.in_doubt and rank_state.step != before for rank_state in survivors):
        raise InvariantError(f"survivors of one attempt disagree, which is a bug in Holdfast: {list(survivors)}")
    return apply, before + apply


def _message(
    survivors: Sequence[int], newcomers: Sequence[int], step: int, in_doubt: Sequence[bool], apply: bool
) -> str:
    said = f"{_ranks(survivors)} from memory at step {step}"
    if any(in_doubt):
        names = _names([rank for rank, doubt in zip(survivors, in_doubt, strict=True) if doubt])
        said += f"; step {step if apply else step + 1}, in doubt on {names}, is "
        said += "applied: every survivor was prepared" if apply else "discarded: a survivor was not prepared"
    return said + (f"; {_names(newcomers)} copy the state" if newcomers else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {_names(ranks)} continues" if len(ranks) == 1 else f"ranks {_names(ranks)} continue"


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _need(holds: bool, rank_state: RankState, what: str) -> None:
    if not holds:
        raise InvariantError(f"a rank {what}, against the step protocol, which is a bug in Holdfast: {rank_state}")
