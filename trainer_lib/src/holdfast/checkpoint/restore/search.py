"""The newest checkpoint that can be read: verify every byte of it, and fall back to an older one. No torch.

All ranks go through the same candidates, newest first, and accept a checkpoint only when each rank has read and
verified all that it needs of it. What a rank finds corrupt is read again, by itself and by another rank
(`fault_check`). Only if that fails too, the copy is corrupt for all ranks: if no good copy of something is left, the
next older checkpoint is tried.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.ranks.exchange import Alone, Exchange, each, gather
from holdfast.checkpoint.restore import lossy_delta
from holdfast.checkpoint.restore.candidates import Candidates, DeletedError, Where, as_stores
from holdfast.checkpoint.restore.fault_check import Outcome, Part, asked, suspects
from holdfast.checkpoint.restore.rank_reader import Loaded, RankReader, Select
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, SuspectError

_log = logging.getLogger("holdfast.checkpoint.reader")

# Of commits that are lost so many are named in an error.
_TOLD: Final = 5
# A job may delete commits while they are read. So often the newest one is looked for again.
_LOOKS: Final = 5

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The outcome of looking for a commit: None means a fresh start.

    `stores` are those that it came from; `lost` are the newer commits of which no good copy was left, and why.
    `stuck`: no commit was read, and these stand in stores that all share, where nothing was moved: who begins anew
    would give them up. `again`: nothing was decided, since a store that was left out answers now.
    """

    loaded: Loaded | None
    quarantined: tuple[catalog.Quarantined, ...] = ()
    stores: tuple[str, ...] = ()
    lost: tuple[catalog.Quarantined, ...] = ()
    stuck: tuple[catalog.Quarantined, ...] = ()
    again: bool = False

    @property
    def step(self) -> int:
        """The step from which training goes on."""
        return self.loaded.name.step if self.loaded else 0

    @property
    def pair(self) -> AttemptId | None:
        """The attempt that made the commit."""
        return self.loaded.name.pair if self.loaded else None


def _accepts(_step: int, _lost: bool) -> bool:
    """Takes whatever was found."""
    return False


def newest(
    where: Where,
    *,
    claims: Iterable[Claim],
    job_uid: str,
    resume: fencing.Resume = fencing.Resume.ALWAYS,
    step: int | None = None,
) -> tuple[CheckpointName, Manifest] | None:
    """The newest readable commit (of `step`) with a good manifest, as one rank sees it."""
    begin = partial(
        Candidates,
        stores=as_stores(where),
        exchange=Alone(),
        claims=tuple(claims),
        job_uid=job_uid,
        resume=resume,
        step=step,
    )
    return _looked(begin, lambda search: next(search.commits(), None))


def restore(
    where: Where,
    exchange: Exchange,
    *,
    claims: Iterable[Claim] = (),
    job_uid: str = "",
    resume: fencing.Resume = fencing.Resume.ALWAYS,
    step: int | None = None,
    select: Select | None = None,
    host: str | None = None,
    first: bool = False,
    lone: bool = False,
    again: Callable[[int, bool], bool] = _accepts,
) -> Restored:
    """Read the newest good commit (or the best one of `step`) on every rank; `loaded` is None if there is none.

    SuspectError if a rank cannot read what another can. `host` is this rank's, for people. `first`: where
    there is one commit it is the first that was made, and is moved aside if it is damaged. `lone`: who reads is of no
    job, and moves nothing of one. `again` is asked on every rank before a commit is accepted and anything moved, by
    its step (0: none) and whether newer ones are lost: if it says yes, nothing was done, and the outcome says so.

    A commit that is deleted while it is read is not lost: the newest one is looked for again. CheckpointError if that
    happens several times in a row.
    """
    begin = partial(
        Candidates,
        stores=as_stores(where),
        exchange=exchange,
        claims=tuple(claims),
        job_uid=job_uid,
        resume=resume,
        step=step,
        lone=lone,
    )
    reader = socket.gethostname() if host is None else host
    return _looked(begin, lambda search: _first_good(search, select, reader, first=first, again=again))


def _looked(begin: Callable[[], Candidates], look: Callable[[Candidates], _Found]) -> _Found:
    """What a look finds; it begins again where a commit was deleted meanwhile. The same on every rank."""
    gone: list[str] = []
    for _ in range(_LOOKS):
        search = begin()
        try:
            return look(search)
        except DeletedError as deleted:
            gone.append(str(deleted))
            if search.exchange.rank == 0:
                _log.info("%s was deleted while it was read: the newest commit is looked for again", deleted)
    raise CheckpointError(
        f"{', '.join(gone)} were deleted while they were read, one after the other; nothing was changed: let the job "
        "that commits there keep more of them (keep_last, checkpoint.retention.keepLast), or read a copy"
    )


def _first_good(
    search: Candidates, select: Select | None, host: str, *, first: bool, again: Callable[[int, bool], bool]
) -> Restored:
    exchange = search.exchange
    for name, manifest in search.commits():
        with RankReader(name, manifest, search.holding(name), exchange) as own:
            own.read(select)
            outcomes = gather(exchange, own.outcome(host))
            if not search.another:
                _raise_first(outcomes)
            outcomes = _confirmed(name, outcomes, own, exchange)
            faulty = search.judge(name, outcomes)
            if any(one.damage or one.error for one in outcomes):
                search.condemn(name, own.faults, faulty)
                continue
            if faulty and all(exchange.gather(own.spare(faulty))):
                search.condemn(name, own.faults, faulty)
            if again(name.step, bool(search.lost)):
                return Restored(loaded=None, again=True)
            search.put_aside()
            if exchange.rank == 0 and manifest.bounds:
                _log.warning("%s is not exact: %s", name, lossy_delta.told(manifest))
            used = tuple(dict.fromkeys(url for one in outcomes for url in one.used))
            return Restored(loaded=own.loaded, quarantined=tuple(search.bad), stores=used, lost=tuple(search.lost))
    if again(0, True):
        return Restored(loaded=None, again=True)
    stuck = search.stuck()
    if stuck and not (first and len(stuck) == 1):
        return Restored(loaded=None, lost=tuple(search.lost), stuck=stuck)
    search.put_aside()
    return Restored(loaded=None, quarantined=tuple(search.bad), lost=tuple(search.lost))


def none_whole(found: Restored, urls: Sequence[str]) -> str:
    """For people: what none of which can be read, and what to do."""
    bad = "; ".join(f"{one.path} ({one.reason})" for one in found.stuck[:_TOLD])
    more = f"; and {len(found.stuck) - _TOLD} more" if len(found.stuck) > _TOLD else ""
    aside = " and ".join(f"'holdfast checkpoints verify {url} --quarantine'" for url in urls)
    return (
        f"no commit in {' or '.join(urls)} is whole: {bad}{more}. Nothing was moved or deleted, and nobody begins "
        f"anew over them. Mend the storage, or move what is damaged into quarantine/ with {aside}, and start again"
    )


def _confirmed(name: CheckpointName, outcomes: list[Outcome], own: RankReader, exchange: Exchange) -> list[Outcome]:
    """The outcomes without what other ranks can read; SuspectError if somebody lacks it. No fault, no question."""
    questions = asked(outcomes)
    if not questions:
        return outcomes
    mine = [part for part, witness in questions.items() if witness == exchange.rank]
    answers = each(exchange, lambda: [list(part) for part in mine if own.can_read(part)])
    cleared: dict[Part, int] = {tuple(part): rank for rank, parts in enumerate(answers) for part in parts}
    found = suspects(outcomes, cleared)
    if found:
        raise SuspectError(
            f"{name}: {'; '.join(found)}: memory, network or page cache there are suspect, and no commit was moved; "
            "keep the job off that machine, and start again"
        )
    if cleared and exchange.rank == 0:
        _log.warning("%s: what others read well was read badly, and then had from other copies: %s", name, [*cleared])
    return [one.without(cleared) for one in outcomes]


def _raise_first(outcomes: Sequence[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise CheckpointError(f"rank {rank}: {outcome.error}")
