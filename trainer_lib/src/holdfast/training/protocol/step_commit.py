"""The protocol of one step: what a rank's state is worth, and which state goes on after a failure. Pure.

A step goes: averages of all members arrive without error (**prepared**), a vote over all members, then the optimizer
(**committed**). A vote's return proves that every member launched it. A rank whose vote failed cannot know whether it
returned elsewhere: it is **in doubt**, and keeps its averages until the members of a later attempt have compared
their standings (`resolve`).

A rank's state carries two marks. `synced` is the last attempt whose common state it took over; `voted` is the last
attempt in which that state, here or where it came from, was voted on. The highest (voted, then synced) goes on, and
all equal to it are **survivors**: equal marks mean that they began from one state and lack at most the last step of
`voted`. A doubt counts only while both marks name its attempt: a later synchronisation has settled it.

**Invariant.** If the vote on (a, s) returned to any process, a dead one included, every member of *a* was prepared
for it, so every survivor of *a* holds the identical averages and applies it. If any survivor was not prepared, the
vote returned to nobody, and all discard it. So no step that a vote returned for is lost while one member of its
attempt lives, none is applied twice, and all survivors have the same state.

A step that survivors apply from a doubt is as safe as that when the next vote returned: if all of them die before,
who was no survivor goes on from the step before it, and makes it again. A checkpoint of it needs the whole world, so
none exists then; what a rank told its launcher of the step is told twice.

It needs of its callers: a member that has shown its standing to a later attempt votes in no earlier one, `voted` is
set before the vote is launched, a newcomer keeps its own state and marks until all of another has arrived, and a
state that is half changed is `torn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.attempt import AttemptId, Json
from holdfast.core.errors import DocumentError, InvariantError


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """Prepared in `pair` for the step after `step`: averages and ballot are kept, nothing is applied."""

    pair: AttemptId
    step: int

    def to_json(self) -> dict[str, Any]:
        return {"pair": self.pair.to_json(), "step": self.step}

    @classmethod
    def from_optional(cls, value: Json | None) -> PreparedStep | None:
        """Read the wire form, which may be null."""
        return None if value is None else cls(pair=AttemptId.from_json(value["pair"]), step=int(value["step"]))


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What a rank shows the others of its state. Without a vote behind it, it is a newcomer's."""

    step: int = 0
    voted: AttemptId | None = None
    synced: AttemptId | None = None
    doubt: PreparedStep | None = None

    @property
    def in_doubt(self) -> bool:
        """Whether the doubt counts: prepared for the next step of the attempt that it last voted and synced in."""
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


# The life of a state


def prepared(standing: RankState, pair: AttemptId) -> RankState:
    """All averages of the next step arrived without error, and are kept."""
    _need(standing.synced == pair, standing, f"prepares in {pair}")
    _need(standing.doubt is None, standing, "prepares while it is in doubt")
    return replace(standing, doubt=PreparedStep(pair=pair, step=standing.step))


def voted(standing: RankState, pair: AttemptId) -> RankState:
    """The vote is launched next."""
    _need(standing.synced == pair, standing, f"votes in {pair}")
    _need(standing.doubt == PreparedStep(pair=pair, step=standing.step), standing, "votes without being prepared")
    return replace(standing, voted=pair)


def committed(standing: RankState) -> RankState:
    """The vote returned, and the kept averages are applied."""
    _need(standing.in_doubt, standing, "applies a step that it did not vote on")
    return replace(standing, step=standing.step + 1, doubt=None)


def synchronised(standing: RankState, pair: AttemptId, step: int, voted: AttemptId | None) -> RankState:
    """This rank has the common state of `pair`; `step` and `voted` are the verdict's.

    A survivor's doubt is settled by it: before, the kept averages were applied or forgotten, as the verdict said. It
    is one change with that: an applied step under the old marks would contradict a survivor that was not prepared.
    A newcomer gave its own state up with `torn` before another replaced it; of a checkpoint or a fresh start, `step`
    is its step and `voted` None.
    """
    _need(standing.synced is None or standing.synced < pair, standing, f"synchronises in {pair}")
    _need(voted is None or voted < pair, standing, f"takes over the votes of {voted} in {pair}")
    if standing.voted is not None or standing.synced is not None:
        mine = {standing.step, standing.step + standing.in_doubt}
        _need(standing.voted == voted and step in mine, standing, f"takes step {step} of {voted} for its own")
    return RankState(step=step, voted=voted, synced=pair)


def affirmed(standing: RankState, pair: AttemptId) -> RankState:
    """An empty vote on the common state of `pair` is launched next: what was applied from a doubt may be committed.

    Until a vote in `pair` a rank outside it, with the marks of the attempt before, could go on without the step.
    """
    _need(standing.synced == pair and standing.doubt is None, standing, f"affirms {pair}")
    return replace(standing, voted=pair)


def torn(standing: RankState) -> RankState:
    """The state was half changed, or is gone: it comes back as a newcomer only."""
    return replace(standing, step=0, voted=None, synced=None, doubt=None)


# Which state goes on


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """Which state goes on in a new world; the same on each of its ranks.

    `survivors` have it, `donor` is the lowest of them, and `newcomers` need it. With `apply`, survivors in doubt
    apply their kept averages, else they forget them; `step` is the committed step after that. Without survivors
    (`donor` is None) the newest readable checkpoint goes on, or a fresh start.
    """

    survivors: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()
    donor: int | None = None
    apply: bool = False
    step: int = 0
    voted: AttemptId | None = None
    message: str = ""


def resolve(standings: Sequence[RankState], commit: AttemptId | None = None) -> Resolution:
    """Decide from all ranks' standings, in order of their ranks in the new world.

    `commit` is the pair of the newest readable checkpoint: one above every memory's votes goes on instead of them.
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
    """What orders states; a state that was never voted on is below all."""
    return standing.voted or _LOWEST, standing.synced or _LOWEST


_LOWEST = AttemptId(-1, -1)


def _settle(survivors: Sequence[RankState]) -> tuple[bool, int]:
    """Whether the doubters apply, and the survivors' step after that."""
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
