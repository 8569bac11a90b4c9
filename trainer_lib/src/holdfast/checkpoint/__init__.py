"""Checkpoints, usable alone.

    from holdfast import checkpoint

    checkpoint.save("ckpt", step=100, model=model, optimizer=optimizer)
    found = checkpoint.load("ckpt", model=model, optimizer=optimizer)   # the newest good one; None if there is none

What is saved is durable when `save` returns, and every byte is verified when it is read: what is damaged is named
and moved to `quarantine/`, and the next older commit is used. Where a job commits, `load` moves nothing: its ranks
find out whether it is damaged, or only this machine reads it badly. No pickle is written or read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CLAIMS, CheckpointName, step_number
from holdfast.checkpoint.ranks.exchange import Alone, Exchange, lead
from holdfast.checkpoint.restore.search import none_whole, restore
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, NoneWholeError, StateError, UsageError
from holdfast.core.paths import local_path

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from holdfast.checkpoint.format.manifest import Manifest
    from holdfast.checkpoint.restore.memory_layout import Rows
    from holdfast.checkpoint.state.flatten import Stateful

__all__ = ["Found", "load", "save"]

_log = logging.getLogger("holdfast.checkpoint")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What `load` has read.

    `lost` are the newer commits that it passed by, and why; `quarantined` is what was moved aside.
    """

    step: int
    path: Path
    quarantined: tuple[catalog.Quarantined, ...] = ()
    lost: tuple[catalog.Quarantined, ...] = ()


def save(
    folder: str | os.PathLike[str], *, step: int, group: ProcessGroup | None = None, **stateful: Stateful
) -> Path:
    """Commit the state of these objects as `step`; returns the commit's folder. A step may be saved again.

    Every rank of `group` calls it, and each writes its part; without one this process writes all. DTensors may be cut
    along any dimensions of any meshes. Ranks may give other objects, as stages of a pipeline have, under other names:
    the commit holds all of them. PeerLostError if one of them is gone.
    """
    from holdfast.checkpoint.process_group_exchange import Together, joined
    from holdfast.checkpoint.saving.snapshot import Snapshot
    from holdfast.checkpoint.saving.writer import save as save_snapshot
    from holdfast.checkpoint.state.flatten import check_stateful, flatten, sampled
    from holdfast.checkpoint.state.numerics import fingerprint
    from holdfast.checkpoint.state.rng import capture

    check_stateful(stateful)
    root, step, flat = local_path(folder), step_number(step), flatten(stateful)
    if group is None and flat.parts:
        raise StateError(f"{min(flat.parts)} has parts on other ranks: give their group to save() on each of them")
    catalog.check_place(root)
    exchange: Exchange = Alone() if group is None else Together(group)
    every = joined(flat, exchange, sampled(stateful, flat))
    number = lead(exchange, lambda: _next_attempt(root, step))
    name = CheckpointName(step=step, pair=AttemptId(0, number))
    snapshot = Snapshot(
        name=name,
        specs=every.specs,
        read=flat.read,
        fill=flat.fill,
        state={"objects": every.objects, "counters": {}},
        data=None,
        alone={"rng": capture()},
        numerics=fingerprint(),
        shares=every.shares,
        mesh=every.mesh,
    )
    result = save_snapshot(root, snapshot, exchange)
    if result.existed:  # the number was free a moment ago, so it is not ours
        raise CheckpointError(
            f"step {step} was not saved in {root}: another process saved it there in the same moment, as {name}: "
            "give group= on every rank, or let one rank alone save, or give each process a folder of its own"
        )
    if not result.committed:
        raise CheckpointError(f"step {step} could not be saved in {root}: {result.message}")
    return root / str(name)


def _next_attempt(root: Path, step: int) -> int:
    if (root / CLAIMS).exists():
        raise CheckpointError(f"{root} belongs to a job (it has claims): save into a folder of its own")
    return 1 + max((name.pair.attempt for name in catalog.list_commits(root) if name.step == step), default=0)


def load(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    group: ProcessGroup | None = None,
    **stateful: Stateful,
) -> Found | None:
    """Give the objects the newest good state (or that of `step`), random generators included.

    With `group` every rank of it calls this, and all take the same commit, which each must be able to read. Of the
    commit's objects only those that are given are read. None if the folder holds no commit, with a warning if it may
    be another folder than was meant. NoneWholeError if there are commits and none can be restored; PeerLostError if a
    rank is gone. UsageError for a commit's own folder, and for one of many ranks that gives neither `group` nor
    `step`.
    """
    from holdfast.checkpoint.process_group_exchange import Together
    from holdfast.checkpoint.state import rng
    from holdfast.checkpoint.state.dtypes import blank
    from holdfast.checkpoint.state.flatten import check_stateful
    from holdfast.checkpoint.state.load import load_into, tell
    from holdfast.checkpoint.state.unflatten import adopt

    check_stateful(stateful)
    root, step = local_path(folder), None if step is None else step_number(step)
    if group is None and step is None:
        _insist_on_one_rank()
    catalog.check_place(root)
    exchange = Alone() if group is None else Together(group)
    found = restore(root, exchange, step=step, select=lambda manifest: _not_of(manifest, stateful), lone=True)
    if found.loaded is None:
        if found.stuck:
            raise NoneWholeError(none_whole(found, [str(root)]))
        if exchange.rank == 0 and (wrong := catalog.what_is_wrong(root)):
            _log.warning("nothing was loaded: %s", wrong)
        return None
    manifest, loaded = found.loaded.manifest, found.loaded
    generators = None if loaded.alone is None else rng.read(rng.of(loaded.alone))
    other = load_into(
        stateful,
        manifest.objects,
        lambda name: adopt(manifest.tensors[name], loaded.tensors[name]),
        blank=lambda name: blank(manifest.tensors[name]),
        partly=True,
    )
    if generators is not None:
        generators.apply()
    if exchange.rank == 0:
        tell(other)
    path = root / str(loaded.name)
    return Found(step=found.step, path=path, quarantined=found.quarantined, lost=found.lost)


def _insist_on_one_rank() -> None:
    from holdfast.checkpoint.process_group_exchange import ranks

    if ranks() > 1:
        raise UsageError(
            f"load() was called without group= and step= in a world of {ranks()} ranks, and loaded "
            "nothing: ranks that look for the newest checkpoint by themselves may load different ones, as a network "
            "file system shows a new one late on some hosts. Give group= on every rank, or step= if one rank loads "
            "alone"
        )


def _not_of(manifest: Manifest, objects: Collection[str]) -> Rows:
    """No rows of the tensors that none of these objects has."""
    from holdfast.checkpoint.ranks.merge import tensors_in

    asked = {name for one in objects for name in tensors_in(manifest.objects.get(one))}
    return {name: (0, 0) for name in manifest.tensors if name not in asked}
