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
complete other state. A state that is partly changed is marked as `torn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.attempt import AttemptId, Json
from holdfast.core.errors import DocumentError, InvariantError


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A step after `step` that was prepared in `pair`. Averages and ballot are kept, and nothing is applied."""

    pair: AttemptId
    step: int

    def to_json(self) -> dict[str, Any]:
        return {"pair": self.pair.to_json(), "step": self.step}

    @classmethod
    def from_optional(cls, value: Json | None) -> PreparedStep | None:
        """Parse the wire form, which may be null."""
        return None if value is None else cls(pair=AttemptId.from_json(value["pair"]), step=int(value["step"]))


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The part of a rank's state that other ranks see. Without a vote, the rank is a newcomer."""

    step: int = 0
    voted: AttemptId | None = None
    synced: AttemptId | None = None
    doubt: PreparedStep | None = None

    @property
    def in_doubt(self) -> bool:
        """Whether the prepared step counts: it is the next step of the attempt of both marks."""
        if self.doubt is None or self.synced is None or self.voted != self.synced:
            return False
        return self.doubt == PreparedStep(pair=self.synced, step=self.step)

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "voted": None if self.voted is None else self.voted.to_json(),
            "synced": None if self.synced is None else self.synced.to_json(),
            "doubt": None if self.doubt is None else self.doubt.to_json(),
        }

    @classmethod
    def from_json(cls, value: Json) -> RankState:
        try:
            return cls(
                step=int(value["step"]),
                voted=AttemptId.from_optional(value["voted"]),
                synced=AttemptId.from_optional(value["synced"]),
                doubt=PreparedStep.from_optional(value["doubt"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentError(f"not a standing: {value!r}") from error


# Transitions of a state


def prepared(standing: RankState, pair: AttemptId) -> RankState:
    """Record that all averages of the next step arrived without error and are kept."""
    _need(standing.synced == pair, standing, f"prepares in {pair}")
    _need(standing.doubt is None, standing, "prepares while it is in doubt")
    return replace(standing, doubt=PreparedStep(pair=pair, step=standing.step))


def voted(standing: RankState, pair: AttemptId) -> RankState:
    """Record that the vote starts next."""
    _need(standing.synced == pair, standing, f"votes in {pair}")
    _need(standing.doubt == PreparedStep(pair=pair, step=standing.step), standing, "votes without being prepared")
    return replace(standing, voted=pair)


def committed(standing: RankState) -> RankState:
    """Record that the vote returned and the kept averages are applied."""
    _need(standing.in_doubt, standing, "applies a step that it did not vote on")
    return replace(standing, step=standing.step + 1, doubt=None)


def synchronised(standing: RankState, pair: AttemptId, step: int, voted: AttemptId | None) -> RankState:
    """Record that this rank has the common state of `pair`. `step` and `voted` come from the resolution.

    This resolves a survivor's prepared step: its averages were applied or discarded before, as the resolution
    requires. Both are one change, because an applied step with the old marks would contradict a survivor that was not
    prepared. A newcomer has abandoned its own state with `torn` before another one replaced it. For a checkpoint or a
    fresh start, `step` is its step and `voted` is None.
    """
    _need(standing.synced is None or standing.synced < pair, standing, f"synchronises in {pair}")
    _need(voted is None or voted < pair, standing, f"takes over the votes of {voted} in {pair}")
    if standing.voted is not None or standing.synced is not None:
        mine = {standing.step, standing.step + standing.in_doubt}
        _need(standing.voted == voted and step in mine, standing, f"takes step {step} of {voted} for its own")
    return RankState(step=step, voted=voted, synced=pair)


def affirmed(standing: RankState, pair: AttemptId) -> RankState:
    """Record that an empty vote on the common state of `pair` starts next. A step in doubt that was applied may then
    be saved.

    Until a vote in `pair`, a rank outside it that has the marks of the previous attempt could continue without the
    step.
    """
    _need(standing.synced == pair and standing.doubt is None, standing, f"affirms {pair}")
    return replace(standing, voted=pair)


def torn(standing: RankState) -> RankState:
    """Record that the state was partly changed or is lost, so that the rank can only return as a newcomer."""
    return replace(standing, step=0, voted=None, synced=None, doubt=None)


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


def resolve(standings: Sequence[RankState], commit: AttemptId | None = None) -> Resolution:
    """Decide from all ranks' states, in order of their ranks in the new world.

    `commit` is the attempt ID of the newest readable checkpoint. If it is above the votes of all states in memory,
    the checkpoint continues instead of them.
    """
    marks = max((_marks(standing) for standing in standings if standing.voted is not None), default=None)
    everyone = range(len(standings))
    if marks is None:
        return Resolution(newcomers=tuple(everyone), message="no rank has a state in memory")
    if commit is not None and commit > marks[0]:
        return Resolution(newcomers=tuple(everyone), message=f"a checkpoint of {commit} is newer than any memory")
    survivors = tuple(rank for rank in everyone if _marks(standings[rank]) == marks)
    newcomers = tuple(rank for rank in everyone if rank not in survivors)
    apply, step = _settle([standings[rank] for rank in survivors])
    return Resolution(
        survivors=survivors,
        newcomers=newcomers,
        donor=survivors[0],
        apply=apply,
        step=step,
        voted=standings[survivors[0]].voted,
        message=_message(survivors, newcomers, step, [standings[rank].in_doubt for rank in survivors], apply),
    )


def _marks(standing: RankState) -> tuple[AttemptId, AttemptId]:
    """Return the marks, by which states are ordered. A state without any vote is below all others."""
    return standing.voted or _LOWEST, standing.synced or _LOWEST


_LOWEST = AttemptId(-1, -1)


def _settle(survivors: Sequence[RankState]) -> tuple[bool, int]:
    """Return whether the survivors in doubt apply their step, and the survivors' step after that."""
    before = min(standing.step for standing in survivors)
    after = max(standing.step for standing in survivors)
    doubts = any(standing.in_doubt for standing in survivors)
    apply = doubts and all(standing.in_doubt or standing.step == before + 1 for standing in survivors)
    if after > before + apply or any(standing.in_doubt and standing.step != before for standing in survivors):
        raise InvariantError(f"survivors of one attempt disagree, a defect of Holdfast: {list(survivors)}")
    return apply, before + apply


def _message(
    survivors: Sequence[int], newcomers: Sequence[int], step: int, doubts: Sequence[bool], apply: bool
) -> str:
    said = f"{_ranks(survivors)} on from memory at step {step}"
    if any(doubts):
        in_doubt = _names([rank for rank, doubt in zip(survivors, doubts, strict=True) if doubt])
        said += f"; step {step if apply else step + 1}, in doubt on {in_doubt}, is "
        said += "applied: every survivor was prepared" if apply else "discarded: a survivor was not prepared"
    return said + (f"; {_names(newcomers)} take the state over" if newcomers else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {_names(ranks)} goes" if len(ranks) == 1 else f"ranks {_names(ranks)} go"


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _need(holds: bool, standing: RankState, what: str) -> None:
    if not holds:
        raise InvariantError(f"a rank {what}, against the protocol of the step, a defect of Holdfast: {standing}")
