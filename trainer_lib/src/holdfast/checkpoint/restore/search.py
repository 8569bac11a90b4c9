"""Finding the newest commit that can be read, verifying every byte of it, and falling back. No torch.

All ranks look through the same names, newest first, and take a commit only when each has read and verified all that
it needs of it, chunk by chunk from the first store whose copy is good. What a rank finds bad is read again, by itself
and by another one; if that is no better it is bad for all: where no good copy of something is left, the next older
commit is tried. What is bad is named, and moved to its store's quarantine once another commit was read: as long as
none was, all stays as it is, but for the first commit of a job. A bad copy stays too if something of a commit that
was restored is nowhere else: it will be needed. A reader that is of no job moves nothing where a job commits: it may
be alone, on a machine that reads badly.

A step may lie in memory whole, and in the durable stores as what changed since an earlier one. The files have the
same names and other bytes, so these are two editions: each is read by its own manifest, the one in memory first.
"""

from __future__ import annotations

import json
import logging
import math
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import xxhash

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit, rank_file
from holdfast.checkpoint.format.manifest import Manifest, decode, encode
from holdfast.checkpoint.format.safetensors_header import check_json, check_source
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.ranks.exchange import Alone, Exchange, each
from holdfast.checkpoint.restore.chunk_reader import (
    READERS,
    Copies,
    Rows,
    Span,
    lay_out,
    needed,
    read_into,
    read_small,
    spare,
    whole_file,
)
from holdfast.checkpoint.restore.chunk_reader import Fault as CopyFault
from holdfast.checkpoint.restore.fault_check import Fault, Outcome, Part, asked, suspects
from holdfast.checkpoint.save import lossy_delta
from holdfast.checkpoint.stores.base import CheckpointStore, manifest_of, open_file
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, DamagedError, SuspectError, UnknownFormatError
from holdfast.core.gc_pause import uncollected

_log = logging.getLogger("holdfast.checkpoint.reader")

# Of commits that are lost so many are named in an error.
_TOLD: Final = 5
# A job may delete commits while they are read. So often the newest one is looked for again.
_LOOKS: Final = 5

Where = Path | Sequence[CheckpointStore]
"""One folder, or stores in the order in which they are asked."""
_Found = TypeVar("_Found")
Select = Callable[[Manifest], Rows]
"""Which rows this rank wants of the tensors of which it does not want all."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A commit in memory, every byte verified. `alone` is what this rank saved for itself, if it was there then.

    Of the tensors that `Select` named, only the rows that were asked for are here.
    """

    name: CheckpointName
    manifest: Manifest
    tensors: Mapping[str, memoryview]
    alone: Any


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
        _Search,
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
        _Search,
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


def _looked(begin: Callable[[], _Search], look: Callable[[_Search], _Found]) -> _Found:
    """What a look finds; it begins again where a commit was deleted meanwhile. The same on every rank."""
    gone: list[str] = []
    for _ in range(_LOOKS):
        search = begin()
        try:
            return look(search)
        except _DeletedError as deleted:
            gone.append(str(deleted))
            if search.exchange.rank == 0:
                _log.info("%s was deleted while it was read: the newest commit is looked for again", deleted)
    raise CheckpointError(
        f"{', '.join(gone)} were deleted while they were read, one after the other; nothing was changed: let the job "
        "that commits there keep more of them (keep_last, checkpoint.retention.keepLast), or read a copy"
    )


class _DeletedError(Exception):
    """The commit at hand is in no store any more, as every rank knows: not damaged, but deleted meanwhile."""


def _first_good(
    search: _Search, select: Select | None, host: str, *, first: bool, again: Callable[[int, bool], bool]
) -> Restored:
    exchange = search.exchange
    for name, manifest in search.commits():
        with _Reading(name, manifest, search.holding(name), exchange) as own:
            own.read(select)
            outcomes = [Outcome.from_json(value) for value in exchange.gather(own.outcome(host).to_json())]
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


def as_stores(where: Where) -> tuple[CheckpointStore, ...]:
    """The stores that are meant."""
    return (FolderStore(where),) if isinstance(where, Path) else tuple(where)


# Choosing

_BOTH: Final = frozenset({True, False})


@dataclass(frozen=True, kw_only=True)
class _View:
    """What one rank sees of a commit's manifest."""

    seal: str = ""
    job_uid: str = ""
    publication: str = ""
    faults: tuple[Fault, ...] = ()
    foreign: str = ""
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """To the other ranks."""
        return {**vars(self), "faults": [vars(fault) for fault in self.faults]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> _View:
        """From another rank."""
        return cls(**{**value, "faults": tuple(Fault(**fault) for fault in value["faults"])})


@dataclass(kw_only=True)
class _Search:
    """What every rank remembers alike while it looks. `held` is, store by store, what lies there."""

    stores: Sequence[CheckpointStore]
    exchange: Exchange
    claims: tuple[Claim, ...]
    job_uid: str
    resume: fencing.Resume
    step: int | None
    lone: bool = False
    bad: list[catalog.Quarantined] = field(default_factory=list)
    lost: list[catalog.Quarantined] = field(default_factory=list)
    aside: list[tuple[CheckpointStore, CheckpointName, str]] = field(default_factory=list)
    """The copies that this rank is to move aside, and why."""
    held: list[frozenset[str]] = field(default_factory=list)
    doubted: tuple[Fault, ...] = ()
    """What is wrong with manifests of the commit at hand, of which another store has a good one."""
    edition: frozenset[bool] = _BOTH
    """Whether stores that all share, each node's own, or both have the files that the manifest at hand is of."""
    another: bool = False
    """Whether another edition of the commit at hand is tried next."""

    def commits(self) -> Iterator[tuple[CheckpointName, Manifest]]:
        """The readable commits with a good manifest, newest first, the same on every rank."""
        for name in self._names():
            self.edition = _BOTH
            manifest = self._manifest(name)
            if manifest is None:
                continue
            if manifest.stands_on and not all(store.shared for store in self.stores):
                yield from self._whole(name)
            yield name, manifest

    def _whole(self, name: CheckpointName) -> Iterator[tuple[CheckpointName, Manifest]]:
        """The commit as it lies in memory, if it does; after it, only the durable stores count."""
        durable, self.edition = self.doubted, frozenset({False})
        manifest, view = self._view(name)
        views = [_View.from_json(value) for value in self.exchange.gather(view.to_json())]
        leader = next((rank for rank, one in enumerate(views) if one.seal), None)
        self.doubted = self._doubts(views)
        if leader is not None:
            self.another = True
            yield name, self._agreed(manifest, views, leader)
            self.another = False
        self.doubted, self.edition = durable, frozenset({True})

    def holding(self, name: CheckpointName) -> list[CheckpointStore]:
        """This rank's stores that have the commit, those with a bad manifest last."""
        held = zip(self.stores, self.held, strict=True)
        found = [store for store, names in held if str(name) in names and store.shared in self.edition]
        doubted = {fault.url for fault in self.doubted}
        return sorted(found, key=lambda store: store.url in doubted)

    def _names(self) -> list[CheckpointName]:
        answers = each(self.exchange, self._list)
        shared = answers[0]["held"]
        self.held = [
            frozenset(shared[place] if store.shared else answers[self.exchange.rank]["held"][place])
            for place, store in enumerate(self.stores)
        ]
        told = (Claim.from_json(claim) for answer in answers for claim in answer["claims"])
        self.claims = fencing.union(self.claims, told)
        names = {parse_commit(name) for answer in answers for held in answer["held"] for name in held}
        wanted = [name for name in names if name is not None and self.step in (None, name.step)]
        return sorted(wanted, key=lambda name: (name.step, name.pair), reverse=True)

    def _list(self) -> dict[str, Any]:
        """Rank 0 looks into what all share, each rank into what is its own."""
        seen = [store if self.exchange.rank == 0 or not store.shared else None for store in self.stores]
        return {
            "held": [[] if store is None else [str(name) for name in store.commits()] for store in seen],
            "claims": [claim.to_json() for store in seen if store is not None for claim in store.claims()],
        }

    def _manifest(self, name: CheckpointName) -> Manifest | None:
        """The commit's manifest, the same on every rank; None if it may not or cannot be used."""
        self.doubted = ()
        manifest, view = self._view(name)
        views = [_View.from_json(value) for value in self.exchange.gather(view.to_json())]
        leader = next((rank for rank, one in enumerate(views) if one.seal), None)
        if not self._readable(name, None if leader is None else views[leader]):
            return None
        if leader is None:
            self._without_manifest(name, views)
            return None
        self.doubted = self._doubts(views)
        return self._agreed(manifest, views, leader)

    def _agreed(self, manifest: Manifest | None, views: Sequence[_View], leader: int) -> Manifest:
        """The leader's manifest, on every rank."""
        if manifest is not None and all(one.seal == views[leader].seal for one in views):
            return manifest
        text = encode(manifest).decode() if manifest is not None and leader == self.exchange.rank else None
        return decode(self.exchange.gather(text)[leader].encode())

    def _doubts(self, views: Sequence[_View]) -> tuple[Fault, ...]:
        """What is wrong with manifests: in what all share, if all find it so."""
        shared = {store.url for store in self.stores if store.shared}
        bad = frozenset.intersection(*(frozenset(fault.url for fault in one.faults) for one in views))
        every = (fault for one in views for fault in one.faults)
        return tuple(fault for fault in every if fault.url in bad or fault.url not in shared)

    def _view(self, name: CheckpointName) -> tuple[Manifest | None, _View]:
        faults: list[Fault] = []
        foreign = error = ""
        # The durable one decides: a step may be committed in memory first, and again with what changed since.
        for store in sorted(self.holding(name), key=lambda store: not store.shared):
            try:
                manifest = manifest_of(store, name)
            except DamagedError as damage:
                faults.append(Fault(url=store.url, reason=str(damage)))
            except UnknownFormatError as unknown:
                foreign = foreign or f"{store.url}/{name}: {unknown}"
            except CheckpointError as trouble:
                error = error or str(trouble)
            else:
                return manifest, _View(
                    seal=xxhash.xxh3_128_hexdigest(encode(manifest)),
                    job_uid=manifest.job_uid,
                    publication=manifest.publication,
                    faults=tuple(faults),
                )
        return None, _View(faults=tuple(faults), foreign=foreign, error=error)

    def _readable(self, name: CheckpointName, view: _View | None) -> bool:
        commit = fencing.Commit(
            step=name.step,
            pair=name.pair,
            job_uid=None if view is None else view.job_uid,
            publication=None if view is None else view.publication,
        )
        return fencing.readable(commit, self.claims, job_uid=self.job_uid, resume=self.resume).ok

    def _without_manifest(self, name: CheckpointName, views: Sequence[_View]) -> None:
        foreign = next((view.foreign for view in views if view.foreign), "")
        if foreign:
            raise UnknownFormatError(
                f"{foreign}; nothing was changed: move it out of the folder to go on from an older commit"
            )
        error = next((view.error for view in views if view.error), "")
        if error:
            raise CheckpointError(error)
        faults = [fault for view in views for fault in view.faults]
        self._lose(name, faults[0].reason if faults else "MANIFEST.json is missing")
        self.condemn(name, views[self.exchange.rank].faults, {fault.url: fault.reason for fault in reversed(faults)})

    # Judging what was read

    def judge(self, name: CheckpointName, outcomes: Sequence[Outcome]) -> dict[str, str]:
        """Which stores have a bad copy, and why."""
        faults = [*self.doubted, *(fault for one in outcomes for fault in one.faults)]
        faulty = {fault.url: fault.reason for fault in reversed(faults)}
        damage = [one.damage or one.error for one in outcomes if one.damage or one.error]
        if damage and self.another:
            _log.warning("%s is not whole in memory (%s): the durable one is read", name, damage[0])
        elif damage:
            self._lose(name, damage[0])
        elif self.exchange.rank == 0:
            used = ", ".join(dict.fromkeys(url for one in outcomes for url in one.used))
            _log.info("%s was read from %s", name, used)
            for url, reason in faulty.items():
                _log.error("%s in %s is damaged (%s); another copy was used", name, url, reason)
        return dict(reversed(faulty.items()))

    def condemn(self, name: CheckpointName, own: Sequence[Fault], faulty: Mapping[str, str]) -> None:
        """What is to be moved aside: by rank 0 in what all share, by each rank what it found in its own stores."""
        mine = {fault.url for fault in (*own, *self.doubted)}
        several = len(self.stores) > 1
        self.bad += [
            catalog.Quarantined(path=str(name), reason=f"{url}: {reason}" if several else reason)
            for url, reason in faulty.items()
        ]
        for store in self.holding(name):
            if store.url in faulty and (self.exchange.rank == 0 if store.shared else store.url in mine):
                self.aside.append((store, name, faulty[store.url]))

    def put_aside(self) -> None:
        """Quarantine it, now that it is not all that there is. What is a job's is left for its own ranks to judge."""
        theirs = self.lone and self.claims
        for store, name, reason in self.aside:
            if theirs:
                _log.error(
                    "%s in %s is damaged, as read here (%s): it is a job's, and stays", name, store.url, reason
                )
            else:
                store.quarantine(name, reason)
        if theirs:
            self.bad.clear()

    def stuck(self) -> tuple[catalog.Quarantined, ...]:
        """What was lost, and stands where all see it. What lay on nodes only went with them: nobody can mend it."""
        shared = zip(self.stores, self.held, strict=True)
        durable = {name for store, names in shared if store.shared for name in names}
        return tuple(one for one in self.lost if one.path in durable)

    def _lose(self, name: CheckpointName, reason: str) -> None:
        """On every rank. _DeletedError if every store that had it says that it is there no more."""
        had = [store for store, names in zip(self.stores, self.held, strict=True) if str(name) in names]
        own = [store for store in had if self.exchange.rank == 0 or not store.shared]
        if all(self.exchange.gather(all(is_gone(store, name) for store in own))):
            raise _DeletedError(name)
        self.lost.append(catalog.Quarantined(path=str(name), reason=reason))
        if self.exchange.rank == 0:
            _log.error("%s is lost: no store has a good copy of all of it (%s)", name, reason)


def is_gone(store: CheckpointStore, name: CheckpointName) -> bool:
    """Whether a store says so; one that cannot be asked says nothing, though it may list nothing either."""
    try:
        if name not in store.commits():
            store.manifest(name)
    except DamagedError:
        return True
    except (CheckpointError, OSError):
        return False
    return False


def _owned(name: CheckpointName, manifest: Manifest) -> fencing.Commit:
    return fencing.Commit(step=name.step, pair=name.pair, job_uid=manifest.job_uid, publication=manifest.publication)


# Reading


class _Reading:
    """One rank's reading of one commit. Its files stay open until the block ends."""

    def __init__(
        self, name: CheckpointName, manifest: Manifest, stores: Sequence[CheckpointStore], exchange: Exchange
    ) -> None:
        self._name = name
        self._manifest = manifest
        self._stores = stores
        self._exchange = exchange
        self._copies = Copies(openers=[partial(open_file, store, name) for store in stores], records=manifest.files)
        self._damage = self._error = ""
        self.loaded: Loaded | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies.close()

    def read(self, select: Select | None) -> None:
        """Read and verify all that this rank needs."""
        try:
            self.loaded = self._read({} if select is None else select(self._manifest))
        except DamagedError as lost:
            self._damage = str(lost)
        except CheckpointError as trouble:
            self._error = str(trouble)
        out_of_reach = {fault.copy: fault.reason for fault in self._copies.faults if not fault.lost}
        for copy, reason in out_of_reach.items():
            _log.warning("%s was passed over: %s", self._stores[copy].url, reason)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The first thing wrong with each file of each copy; a file that a node's own store never had is no fault."""
        first: dict[tuple[str, str], Fault] = {}
        for fault in self._copies.faults:
            store = self._stores[fault.copy]
            if fault.lost and (store.shared or not fault.absent):
                first.setdefault((store.url, fault.file), _told(fault, store))
        return tuple(first.values())

    def outcome(self, host: str) -> Outcome:
        """What came of it."""
        used = tuple(self._stores[place].url for place in sorted(set(self._copies.given.values())))
        return Outcome(host=host, used=used, faults=self.faults, damage=self._damage, error=self._error)

    def can_read(self, part: Part) -> bool:
        """Whether this rank gets what another found bad; an error that says nothing about the bytes is raised."""
        url, file, begin, end = part
        opener = next(partial(open_file, store, self._name) for store in self._stores if store.url == url)
        with closing(Copies(openers=[opener], records=self._manifest.files)) as copies:
            try:
                copies.fetch(file, partial(check_source, file=file, manifest=self._manifest))
                read_into(copies, {}, also=[Span(file=file, begin=begin, end=end)] if end else ())
            except DamagedError:
                return False
        return True

    def spare(self, urls: Collection[str]) -> bool:
        """Whether all that this rank needs can be had without these stores."""
        return spare(self._copies, {place for place, store in enumerate(self._stores) if store.url in urls})

    def _read(self, rows: Rows) -> Loaded:
        manifest, copies, exchange = self._manifest, self._copies, self._exchange
        own = rank_file(exchange.rank)
        small = [file for file in sorted(manifest.files) if not file.endswith(".safetensors")]
        # Of the ranks' own files each rank reads its own; together they verify all.
        turns = [file for index, file in enumerate(small) if file == own or index % exchange.size == exchange.rank]
        beside = self._turns(rows)
        looks = {
            file: partial(check_source, file=file, manifest=manifest)
            for file in sorted({*turns, *needed(manifest, rows), *(span.file for span in beside)})
        }
        for file in looks:
            copies.fetch(file, _is_there)  # before room is made for what they claim to hold
        read = {file: read_small(copies, file) for file in turns}
        with uncollected():
            layout, patches = lay_out(manifest, rows), lossy_delta.wanted(manifest, rows)
        readers = max((getattr(store, "readers", 0) or READERS for store in self._stores), default=READERS)
        extents = lossy_delta.extents((one for _, one in patches), layout.extents)
        read_into(copies, extents, also=beside, looks=looks, threads=readers, fresh=True)
        for name, patch in patches:
            self._apply(patch, layout.tensors[name], rows.get(name))
        if own in read:
            copies.fetch(own, lambda _: check_json(own, read[own]), settled=True)
        alone = json.loads(read[own]) if own in read else None
        return Loaded(name=self._name, manifest=manifest, tensors=layout.tensors, alone=alone)

    def _apply(self, patch: lossy_delta.Wanted, target: memoryview, rows: tuple[int, int] | None) -> None:
        """Put it where it belongs; one that says what no patch does is a fault of each copy that has it."""
        first = 0 if rows is None else rows[0] * math.prod(patch.record.shape[1:])
        self._copies.fetch(patch.patch.file, lambda _: lossy_delta.apply(patch, target, first), settled=True)

    def _turns(self, rows: Rows) -> list[Span]:
        """What is verified beside what is wanted, so that together the ranks verify all: who wants everything
        verifies everything; of files of which only rows are wanted, the ranks in turn verify the headers."""
        files = [file for file in sorted(self._manifest.own) if file.endswith(".safetensors")]
        if not rows:
            return [whole_file(file, self._manifest.files[file]) for file in files]
        rank, size = self._exchange.rank, self._exchange.size
        own = [file for index, file in enumerate(files) if index % size == rank]
        return [Span(file=file, begin=0, end=self._data_begin(file)) for file in own]

    def _data_begin(self, file: str) -> int:
        spans = (span for one in self._manifest.tensors.values() for span in one.spans)
        offsets = [offset for own, offset, _ in spans if own == file]
        return min(offsets, default=self._manifest.files[file].nbytes)


def _told(fault: CopyFault, store: CheckpointStore) -> Fault:
    begin, end = (0, 0) if fault.span is None else (fault.span.begin, fault.span.end)
    own = fault.settled or not store.shared
    return Fault(url=store.url, reason=fault.reason, file=fault.file, begin=begin, end=end, own=own)


def _confirmed(name: CheckpointName, outcomes: list[Outcome], own: _Reading, exchange: Exchange) -> list[Outcome]:
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


def _is_there(_: object) -> None:
    """An open file is as long as the manifest says."""


def _raise_first(outcomes: Sequence[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise CheckpointError(f"rank {rank}: {outcome.error}")
