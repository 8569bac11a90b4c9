"""The search for the newest readable checkpoint: verify every byte, and fall back to older ones. No torch.

All ranks try the same candidates, newest first. They accept a checkpoint only when each rank has read and verified
everything that it needs. Data that a rank finds corrupt is read again, by the same rank and by another one
(`fault_check`). Only if that fails too, the copy is corrupt for all ranks. If no valid copy of something is left, the
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
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank, each, gather
from holdfast.checkpoint.restore import lossy_delta
from holdfast.checkpoint.restore.candidates import Candidates, DeletedError, Location, as_stores
from holdfast.checkpoint.restore.fault_check import Outcome, Part, questions_of, suspects
from holdfast.checkpoint.restore.rank_reader import Loaded, RankReader, Select
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, SuspectError

_log = logging.getLogger("holdfast.checkpoint.reader")

# The number of lost checkpoints that an error names.
_NAMED: Final = 5
# A job may delete checkpoints during the read. The search for the newest one runs at most this many times.
_SEARCHES: Final = 5

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The result of a search for a checkpoint. If `loaded` is None, training starts from the beginning.

    - `stores` are those from which it was read.
    - `lost` has the newer checkpoints without a valid copy, and the reasons.
    - `stuck` has the checkpoints in shared stores, if none could be read and nothing was moved: a new start would
      abandon them.
    - `again` means that nothing was decided, because a store that was skipped is available now.
    """

    loaded: Loaded | None
    quarantined: tuple[catalog.Quarantined, ...] = ()
    stores: tuple[str, ...] = ()
    lost: tuple[catalog.Quarantined, ...] = ()
    stuck: tuple[catalog.Quarantined, ...] = ()
    again: bool = False

    @property
    def step(self) -> int:
        """The step from which training continues."""
        return self.loaded.name.step if self.loaded else 0

    @property
    def attempt_id(self) -> AttemptId | None:
        """The attempt that made the checkpoint."""
        return self.loaded.name.attempt_id if self.loaded else None


def _accepts(_step: int, _lost: bool) -> bool:
    """Accept any result."""
    return False


def newest(
    location: Location,
    *,
    claims: Iterable[Claim],
    job_uid: str,
    resume: fencing.Resume = fencing.Resume.ALWAYS,
    step: int | None = None,
) -> tuple[CheckpointName, Manifest] | None:
    """Return the newest readable checkpoint (of `step`) with a valid manifest, for a single rank."""
    begin = partial(
        Candidates,
        stores=as_stores(location),
        exchange=SingleRank(),
        claims=tuple(claims),
        job_uid=job_uid,
        resume=resume,
        step=step,
    )
    return _repeated(begin, lambda search: next(search.commits(), None))


def restore(
    location: Location,
    exchange: Exchange,
    *,
    claims: Iterable[Claim] = (),
    job_uid: str = "",
    resume: fencing.Resume = fencing.Resume.ALWAYS,
    step: int | None = None,
    before: int | None = None,
    select: Select | None = None,
    host: str | None = None,
    first: bool = False,
    without_job: bool = False,
    again: Callable[[int, bool], bool] = _accepts,
) -> Restored:
    """Read the newest valid checkpoint (or the best one of `step`) on every rank; `loaded` is None if there is none.

    - With `before`, only checkpoints of steps below it count.
    - `host` is the name of this rank's machine, for messages.
    - With `first`, a single checkpoint is the first that was made, and is moved aside if it is corrupt.
    - With `without_job`, the reader has no job, and moves nothing of a job.
    - `again` is called on every rank before a checkpoint is accepted or anything is moved. Its arguments are the step
      (0 if there is none) and whether newer checkpoints are lost. If it returns True, nothing was done, and the
      result reports it.

    A checkpoint that is deleted during the read is not lost: the search runs again. Raise `CheckpointError` if this
    happens several times in a row, and `SuspectError` if a rank cannot read what another rank can.
    """
    begin = partial(
        Candidates,
        stores=as_stores(location),
        exchange=exchange,
        claims=tuple(claims),
        job_uid=job_uid,
        resume=resume,
        step=step,
        before=before,
        without_job=without_job,
    )
    reader = socket.gethostname() if host is None else host
    return _repeated(begin, lambda search: _first_good(search, select, reader, first=first, again=again))


def _repeated(begin: Callable[[], Candidates], use: Callable[[Candidates], _Found]) -> _Found:
    """Run a search, and repeat it if a checkpoint was deleted meanwhile. The result is the same on every rank."""
    deleted_names: list[str] = []
    for _ in range(_SEARCHES):
        search = begin()
        try:
            return use(search)
        except DeletedError as deleted:
            deleted_names.append(str(deleted))
            if search.exchange.rank == 0:
                _log.info("%s was deleted while it was read: searching for the newest checkpoint again", deleted)
    raise CheckpointError(
        f"{', '.join(deleted_names)} were deleted while they were read, one after the other. Nothing was changed. "
        "Keep more checkpoints in the job that saves there (keep_last, checkpoint.retention.keepLast), or "
        "read a copy"
    )


def _first_good(
    search: Candidates, select: Select | None, host: str, *, first: bool, again: Callable[[int, bool], bool]
) -> Restored:
    exchange = search.exchange
    for name, manifest in search.commits():
        with RankReader(name, manifest, search.holding(name), exchange) as own:
            own.read(select)
            outcomes = gather(exchange, own.outcome(host))
            if not search.has_other_edition:
                _raise_first(outcomes)
            outcomes = _confirmed(name, outcomes, own, exchange)
            faulty = search.judge(name, outcomes)
            if any(one.damage or one.error for one in outcomes):
                search.mark_corrupt(name, own.faults, faulty)
                continue
            if faulty and all(exchange.gather(own.available_without(faulty))):
                search.mark_corrupt(name, own.faults, faulty)
            if again(name.step, bool(search.lost)):
                return Restored(loaded=None, again=True)
            search.quarantine_corrupt()
            if exchange.rank == 0 and manifest.bounds:
                _log.warning("%s is not exact: %s", name, lossy_delta.inexactness(manifest))
            used = tuple(dict.fromkeys(url for one in outcomes for url in one.used))
            return Restored(loaded=own.loaded, quarantined=tuple(search.bad), stores=used, lost=tuple(search.lost))
    if again(0, True):
        return Restored(loaded=None, again=True)
    stuck = search.stuck()
    if stuck and not (first and len(stuck) == 1):
        return Restored(loaded=None, lost=tuple(search.lost), stuck=stuck)
    search.quarantine_corrupt()
    return Restored(loaded=None, quarantined=tuple(search.bad), lost=tuple(search.lost))


def no_complete_checkpoint(found: Restored, urls: Sequence[str]) -> str:
    """Return a message that names the unreadable checkpoints and what to do."""
    bad = "; ".join(f"{one.path} ({one.reason})" for one in found.stuck[:_NAMED])
    more = f"; and {len(found.stuck) - _NAMED} more" if len(found.stuck) > _NAMED else ""
    commands = " and ".join(f"'holdfast checkpoints verify {url} --quarantine'" for url in urls)
    return (
        f"no complete checkpoint in {' or '.join(urls)}: {bad}{more}. Nothing was moved or deleted, and "
        "training will not start over. Repair the storage, or move the corrupt checkpoints into "
        f"quarantine/ with {commands}, and start again"
    )


def _confirmed(name: CheckpointName, outcomes: list[Outcome], own: RankReader, exchange: Exchange) -> list[Outcome]:
    """Return the outcomes without the faults that other ranks cleared.

    Raise `SuspectError` if a rank lacks such a part. If there are no faults, nothing is exchanged.
    """
    questions = questions_of(outcomes)
    if not questions:
        return outcomes
    own_questions = [part for part, witness in questions.items() if witness == exchange.rank]
    answers = each(exchange, lambda: [list(part) for part in own_questions if own.can_read(part)])
    cleared: dict[Part, int] = {tuple(part): rank for rank, parts in enumerate(answers) for part in parts}
    found = suspects(outcomes, cleared)
    if found:
        raise SuspectError(
            f"{name}: {'; '.join(found)}. Memory, network or page cache of that machine are suspect, and no "
            "checkpoint was moved. Keep the job off that machine, and start again"
        )
    if cleared and exchange.rank == 0:
        _log.warning(
            "%s: this rank read corrupt bytes that other ranks read correctly, and used other copies: %s",
            name,
            [*cleared],
        )
    return [one.without(cleared) for one in outcomes]


def _raise_first(outcomes: Sequence[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise CheckpointError(f"rank {rank}: {outcome.error}")
