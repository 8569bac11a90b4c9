"""Checkpoints, usable alone.

    from holdfast import checkpoint

    checkpoint.save("ckpt", step=100, model=model, optimizer=optimizer)
    found = checkpoint.load("ckpt", model=model, optimizer=optimizer)   # the newest good one; None if there is none

What is saved is durable when `save` returns, and every byte is verified when it is read: what is damaged is moved
to `quarantine/`, named, and the next older commit is used. No pickle is written or read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.checkpoint import tier
from holdfast.checkpoint.exchange import Alone
from holdfast.checkpoint.names import CLAIMS, CommitName
from holdfast.checkpoint.reader import restore
from holdfast.errors import CheckpointError
from holdfast.worlds import Pair

if TYPE_CHECKING:
    from holdfast.checkpoint.state import Stateful

__all__ = ["Found", "load", "save"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What `load` has read."""

    step: int
    path: Path
    quarantined: tuple[tier.Quarantined, ...] = ()


def save(folder: str | os.PathLike[str], *, step: int, **stateful: Stateful) -> Path:
    """Commit the state of these objects as `step`; returns the commit's folder. A step may be saved again."""
    from holdfast.checkpoint.numerics import fingerprint
    from holdfast.checkpoint.rng import capture
    from holdfast.checkpoint.state import flatten
    from holdfast.checkpoint.writer import Snapshot
    from holdfast.checkpoint.writer import save as save_snapshot

    root = Path(folder)
    if (root / CLAIMS).exists():
        raise CheckpointError(f"{root} belongs to a job (it has claims): save into a folder of its own")
    older = [name.pair.attempt for name in tier.list_commits(root) if name.step == step]
    name = CommitName(step=step, pair=Pair(0, 1 + max(older, default=0)))
    flat = flatten(stateful)
    snapshot = Snapshot(
        name=name,
        specs=flat.specs,
        read=flat.read,
        fill=flat.fill,
        state={"objects": flat.tree, "counters": {}},
        data=None,
        alone={"rng": capture()},
        numerics=fingerprint(),
    )
    result = save_snapshot(root, snapshot, Alone())
    if not result.committed:
        raise CheckpointError(f"step {step} could not be saved in {root}: {result.message}")
    return root / str(name)


def load(folder: str | os.PathLike[str], *, step: int | None = None, **stateful: Stateful) -> Found | None:
    """Give the objects the newest good state (or that of `step`), random generators included."""
    from holdfast.checkpoint.rng import apply
    from holdfast.checkpoint.state import adopt, load_into

    root = Path(folder)
    found = restore(root, Alone(), step=step)
    if found.loaded is None:
        if found.quarantined:
            raise CheckpointError(f"no commit in {root} is whole; what was there is in {root / 'quarantine'}")
        return None
    manifest, loaded = found.loaded.manifest, found.loaded
    load_into(stateful, manifest.state["objects"], lambda name: adopt(manifest.tensors[name], loaded.tensors[name]))
    if loaded.alone is not None:
        apply(loaded.alone["rng"])
    return Found(step=found.step, path=root / str(loaded.name), quarantined=found.quarantined)
