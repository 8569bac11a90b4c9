"""The readable checkpoints, newest first, and which copies of them are to be quarantined. No torch.

What is bad is named, and moved to its store's quarantine once another checkpoint was read: as long as none was, all
stays as it is, but for the first checkpoint of a job. A bad copy stays too if something of a checkpoint that was
restored is nowhere else: it will be needed. A reader that is of no job moves nothing where a job saves: it may be
alone, on a machine that reads badly.

A step may lie in memory complete, and in the durable stores as what changed since an earlier one. The files have the
same names and other bytes, so these are two editions: each is read by its own manifest, the one in memory first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import Manifest, decode, encode
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.ranks.exchange import Exchange, each, gather
from holdfast.checkpoint.restore.fault_check import Fault, Outcome
from holdfast.checkpoint.stores.base import CheckpointStore, manifest_of
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import Claim
from holdfast.core.errors import CheckpointError, DamagedError, UnknownFormatError
from holdfast.core.json_fields import JsonFields

_log = logging.getLogger("holdfast.checkpoint.reader")

Where = Path | Sequence[CheckpointStore]
"""One folder, or stores in the order in which they are asked."""


class DeletedError(Exception):
    """The commit at hand is in no store any more, as every rank knows: not damaged, but deleted meanwhile."""


def as_stores(where: Where) -> tuple[CheckpointStore, ...]:
    return (FolderStore(where),) if isinstance(where, Path) else tuple(where)


_BOTH: Final = frozenset({True, False})


@dataclass(frozen=True, kw_only=True)
class _View(JsonFields):
    """What one rank sees of a commit's manifest."""

    seal: str = ""
    job_uid: str = ""
    publication: str = ""
    faults: tuple[Fault, ...] = ()
    foreign: str = ""
    error: str = ""


@dataclass(kw_only=True)
class Candidates:
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
        views = gather(self.exchange, view)
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
        return sorted(wanted, reverse=True)

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
        views = gather(self.exchange, view)
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
        named = fencing.Commit.named
        commit = named(name) if view is None else named(name, view.job_uid, view.publication)
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
        """On every rank. DeletedError if every store that had it says that it is there no more."""
        had = [store for store, names in zip(self.stores, self.held, strict=True) if str(name) in names]
        own = [store for store in had if self.exchange.rank == 0 or not store.shared]
        if all(self.exchange.gather(all(is_gone(store, name) for store in own))):
            raise DeletedError(name)
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
