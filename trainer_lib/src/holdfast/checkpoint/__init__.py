"""Save and load checkpoints without the Holdfast operator.

    from holdfast import checkpoint

    checkpoint.save("ckpt", step=100, model=model, optimizer=optimizer)
    found = checkpoint.load("ckpt", model=model, optimizer=optimizer)   # the newest valid checkpoint, or None

A checkpoint is durable when `save` returns. `load` verifies every byte that it reads. `load` logs a corrupt
checkpoint, moves it to `quarantine/`, and reads the next older one. In the folder of a job, `load` moves nothing.
Only the job's ranks can find out whether a checkpoint is corrupt, or this machine reads it incorrectly. Checkpoints
contain no pickle.
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
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank, lead
from holdfast.checkpoint.restore.search import Restored, no_complete_checkpoint, restore
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, NoCompleteCheckpointError, StateError, UsageError
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
    """The result of `load`.

    `lost` names the newer checkpoints that `load` skipped, each with the reason. `quarantined` names what `load`
    moved to `quarantine/`.
    """

    step: int
    path: Path
    quarantined: tuple[catalog.Quarantined, ...] = ()
    lost: tuple[catalog.Quarantined, ...] = ()


def save(
    folder: str | os.PathLike[str], *, step: int, group: ProcessGroup | None = None, **stateful: Stateful
) -> Path:
    """Save the state of these objects as a checkpoint of `step`, and return the checkpoint's folder.

    The same step may be saved again. With `group`, every rank of the group calls `save`, and each rank writes its
    part. Without `group`, this process writes everything. DTensors may be sharded along any dimensions of any meshes.
    Ranks may pass different objects under different names, as the stages of a pipeline do: the checkpoint contains
    all of them. Raise `PeerLostError` if a rank is lost.
    """
    from holdfast.checkpoint.process_group_exchange import ProcessGroupExchange, joined
    from holdfast.checkpoint.saving.snapshot import Snapshot
    from holdfast.checkpoint.saving.writer import save as save_snapshot
    from holdfast.checkpoint.state.flatten import check_stateful, flatten, sampled
    from holdfast.checkpoint.state.numerics import fingerprint
    from holdfast.checkpoint.state.rng import capture

    check_stateful(stateful)
    root, step, flat = local_path(folder), step_number(step), flatten(stateful)
    if group is None and flat.parts:
        raise StateError(f"{min(flat.parts)} has parts on other ranks: pass their group to save() on each of them")
    catalog.check_place(root)
    exchange: Exchange = SingleRank() if group is None else ProcessGroupExchange(group)
    every = joined(flat, exchange, sampled(stateful, flat))
    number = lead(exchange, lambda: _next_attempt(root, step))
    name = CheckpointName(step=step, attempt_id=AttemptId(0, number))
    snapshot = Snapshot(
        name=name,
        specs=every.specs,
        read=flat.read,
        fill=flat.fill,
        state={"objects": every.objects, "counters": {}},
        data=None,
        per_rank={"rng": capture()},
        numerics=fingerprint(),
        shares=every.shares,
        mesh=every.mesh,
    )
    result = save_snapshot(root, snapshot, exchange)
    if result.existed:  # the number was free before, so another process wrote this checkpoint
        raise CheckpointError(
            f"step {step} was not saved in {root}: another process saved it there at the same time, as "
            f"{name}. Pass group= on every rank, or let only one rank save, or use a separate folder for "
            "each process"
        )
    if not result.committed:
        raise CheckpointError(f"step {step} could not be saved in {root}: {result.message}")
    return root / str(name)


def _next_attempt(root: Path, step: int) -> int:
    if (root / CLAIMS).exists():
        raise CheckpointError(f"{root} belongs to a job (it has claims): save to another folder")
    return 1 + max((name.attempt_id.attempt for name in catalog.list_commits(root) if name.step == step), default=0)


def load(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    group: ProcessGroup | None = None,
    **stateful: Stateful,
) -> Found | None:
    """Load the newest valid checkpoint, or that of `step`, into the objects and the random number generators.

    With `group`, every rank of the group calls `load`. All ranks load the same checkpoint, which each of them must be
    able to read. Only the objects that are passed are read. Return None if the folder has no checkpoint, and log a
    warning if the folder may be the wrong one.

    Raise `NoCompleteCheckpointError` if no checkpoint can be restored, and `PeerLostError` if a rank is lost. Raise
    `UsageError` for the folder of a single checkpoint, and if one of several ranks passes neither `group` nor `step`.
    """
    from holdfast.checkpoint.process_group_exchange import ProcessGroupExchange
    from holdfast.checkpoint.state import rng
    from holdfast.checkpoint.state.dtypes import on_meta
    from holdfast.checkpoint.state.flatten import check_stateful
    from holdfast.checkpoint.state.load import load_into, log_replaced_settings
    from holdfast.checkpoint.state.unflatten import adopt

    check_stateful(stateful)
    root, step = local_path(folder), None if step is None else step_number(step)
    if group is None and step is None:
        _require_single_rank()
    catalog.check_place(root)
    exchange = SingleRank() if group is None else ProcessGroupExchange(group)
    found = restore(
        root, exchange, step=step, select=lambda manifest: _rows_not_requested(manifest, stateful), without_job=True
    )
    if found.loaded is None:
        _explain(found, root, exchange)
        return None
    manifest, loaded = found.loaded.manifest, found.loaded
    generators = None if loaded.per_rank is None else rng.read(rng.of(loaded.per_rank))
    other = load_into(
        stateful,
        manifest.objects,
        lambda name: adopt(manifest.tensors[name], loaded.tensors[name]),
        on_meta=lambda name: on_meta(manifest.tensors[name]),
        partly=True,
    )
    if generators is not None:
        generators.apply()
    if exchange.rank == 0:
        log_replaced_settings(other)
    return Found(step=found.step, path=root / str(loaded.name), quarantined=found.quarantined, lost=found.lost)


def _explain(found: Restored, root: Path, exchange: Exchange) -> None:
    """Raise `NoCompleteCheckpointError` if no checkpoint can be restored. Warn if the folder may be wrong."""
    if found.stuck:
        raise NoCompleteCheckpointError(no_complete_checkpoint(found, [str(root)]))
    if exchange.rank == 0 and (wrong := catalog.what_is_wrong(root)):
        _log.warning("nothing was loaded: %s", wrong)


def _require_single_rank() -> None:
    from holdfast.checkpoint.process_group_exchange import ranks

    if ranks() > 1:
        raise UsageError(
            f"load() was called without group= and step= in a world of {ranks()} ranks, and loaded nothing. "
            "Ranks that look for the newest checkpoint separately may load different ones, because a "
            "network file system can show a new one late on some hosts. Pass group= on every rank, or "
            "step= if only one rank loads"
        )


def _rows_not_requested(manifest: Manifest, objects: Collection[str]) -> Rows:
    """Select no rows of the tensors that none of these objects has, so that a restore does not read them."""
    from holdfast.checkpoint.ranks.merge import tensors_in

    requested = {name for one in objects for name in tensors_in(manifest.objects.get(one))}
    return {name: (0, 0) for name in manifest.tensors if name not in requested}
