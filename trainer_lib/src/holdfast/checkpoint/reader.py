"""Finding the newest commit that can be read, verifying every byte of it, and falling back. No torch.

Rank 0 chooses and every rank follows; a commit is taken only when every rank has read and verified all that it
needs. What one rank finds bad is bad for all: it is quarantined by rank 0, named, and the next older one is tried.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint import fencing, tier
from holdfast.checkpoint.exchange import Exchange, lead
from holdfast.checkpoint.files import read_verified
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.names import CommitName, parse_commit, rank_file
from holdfast.errors import CheckpointError, DamagedError, UnknownFormatError
from holdfast.worlds import Claim, Pair

_log = logging.getLogger("holdfast.checkpoint.reader")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A commit in memory, every byte verified. `alone` is what this rank saved for itself, if it was there then."""

    name: CommitName
    manifest: Manifest
    files: Mapping[str, bytearray]
    alone: Any

    def chunk(self, file: str, offset: int, nbytes: int) -> memoryview:
        """Bytes of a tensor."""
        return memoryview(self.files[file])[offset : offset + nbytes]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The outcome of looking for a commit: None means a fresh start."""

    loaded: Loaded | None
    quarantined: tuple[tier.Quarantined, ...] = ()

    @property
    def step(self) -> int:
        """The step from which training goes on."""
        return self.loaded.name.step if self.loaded else 0

    @property
    def pair(self) -> Pair | None:
        """The attempt that made the commit."""
        return self.loaded.name.pair if self.loaded else None


@dataclass
class _Search:
    """What rank 0 remembers while it looks: commits that were found bad are not offered again."""

    root: Path
    claims: tuple[Claim, ...]
    job_uid: str
    resume: fencing.Resume
    step: int | None
    bad: list[tier.Quarantined] = field(default_factory=list)

    def next(self) -> str | None:
        """The newest readable commit whose manifest is good."""
        for commit in self._candidates():
            name = CommitName(step=commit.step, pair=commit.pair)
            try:
                tier.read_manifest(self.root, name)
            except DamagedError as error:
                self.condemn(name, str(error))
            except UnknownFormatError as error:
                raise UnknownFormatError(
                    f"{self.root / str(name)}: {error}; nothing was changed: "
                    "move it out of the folder to go on from an older commit"
                ) from error
            else:
                return str(name)
        return None

    def condemn(self, name: CommitName, reason: str) -> None:
        """Quarantine, and remember."""
        self.bad.append(tier.Quarantined(path=str(name), reason=reason))
        tier.quarantine(self.root, name, reason)

    def _candidates(self) -> list[fencing.Commit]:
        condemned = {entry.path for entry in self.bad}
        names = [name for name in tier.list_commits(self.root) if str(name) not in condemned]
        commits = [owner(self.root, name) for name in names if self.step in (None, name.step)]
        return fencing.order(commits, self.claims, job_uid=self.job_uid, resume=self.resume)


def owner(root: Path, name: CommitName) -> fencing.Commit:
    """A commit, and whose it is by its manifest: an attempt that inherited its claim has none of its own."""
    try:
        manifest = tier.read_manifest(root, name)
    except (DamagedError, UnknownFormatError):
        return fencing.Commit(step=name.step, pair=name.pair)
    return fencing.Commit(step=name.step, pair=name.pair, job_uid=manifest.job_uid, publication=manifest.publication)


def newest(
    root: Path, *, claims: Iterable[Claim], job_uid: str, resume: fencing.Resume = fencing.Resume.ALWAYS
) -> CommitName | None:
    """The newest readable commit with a good manifest, as one rank sees it."""
    search = _Search(root=root, claims=tuple(claims), job_uid=job_uid, resume=resume, step=None)
    name = search.next()
    return None if name is None else _parsed(name)


def restore(
    root: Path,
    exchange: Exchange,
    *,
    claims: Iterable[Claim] = (),
    job_uid: str = "",
    resume: fencing.Resume = fencing.Resume.ALWAYS,
    step: int | None = None,
) -> Restored:
    """Read the newest good commit (or the best one of `step`) on every rank; `loaded` is None if there is none."""
    search = _Search(root=root, claims=tuple(claims), job_uid=job_uid, resume=resume, step=step)
    while True:
        chosen = lead(exchange, search.next)
        if chosen is None:
            loaded = None
            break
        name = _parsed(chosen)
        loaded, trouble = _load(root, name, exchange)
        verdicts = exchange.gather(trouble)
        _raise_first(verdicts)
        damage = [f"{verdict['damage']}" for verdict in verdicts if "damage" in verdict]
        if not damage:
            break
        if exchange.rank == 0:
            search.condemn(name, damage[0])
    found = exchange.share([[entry.path, entry.reason] for entry in search.bad])
    return Restored(loaded=loaded, quarantined=tuple(tier.Quarantined(path=p, reason=r) for p, r in found))


def _parsed(name: str) -> CommitName:
    parsed = parse_commit(name)
    if parsed is None:
        raise CheckpointError(f"{name!r} is not the name of a commit")
    return parsed


def _raise_first(verdicts: Sequence[Mapping[str, str]]) -> None:
    for rank, verdict in enumerate(verdicts):
        if "error" in verdict:
            raise CheckpointError(f"rank {rank}: {verdict['error']}")


def _load(root: Path, name: CommitName, exchange: Exchange) -> tuple[Loaded | None, dict[str, str]]:
    try:
        return _read(root, name, exchange), {}
    except DamagedError as error:
        return None, {"damage": str(error)}
    except CheckpointError as error:
        return None, {"error": str(error)}


def _read(root: Path, name: CommitName, exchange: Exchange) -> Loaded:
    manifest = tier.read_manifest(root, name)
    own = rank_file(exchange.rank)
    files: dict[str, bytearray] = {}
    for index, file in enumerate(sorted(manifest.files)):
        # Every rank needs all tensors. Of the ranks' own files each reads its own; together they verify all.
        tensors = file.endswith(".safetensors")
        if tensors or file == own or index % exchange.size == exchange.rank:
            with tier.reading(root / str(name) / file):
                data = read_verified(root / str(name) / file, manifest.files[file])
            if tensors or file == own:
                files[file] = data
    alone = json.loads(files.pop(own)) if own in files else None
    return Loaded(name=name, manifest=manifest, files=files, alone=alone)
