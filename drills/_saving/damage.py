"""checkpoint-8: random corruption of the newest checkpoint must be reported, and the earlier one used."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.writer import save
from holdfast.core.attempt import AttemptId

OLD, NEW, OWNER = 10, 20, "drill"
_FILES = ("rank-0.safetensors", "rank-0.json", MANIFEST)


def contents(step: int) -> dict[str, bytes]:
    """Return the contents of a checkpoint: more than one chunk, and small ones."""
    rng = random.Random(step)  # noqa: S311
    return {"large": rng.randbytes(CHUNK_BYTES + 5000), "small": rng.randbytes(64), "none": b""}


def snapshot(step: int) -> Snapshot:
    """Return the state that is saved at a step."""
    tensors = contents(step)
    return Snapshot(
        name=CheckpointName(step=step, attempt_id=AttemptId(1, 1)),
        specs=[TensorSpec(name=name, dtype="U8", shape=(len(data),)) for name, data in tensors.items()],
        read=lambda piece: tensors[piece.spec.name],
        state={"objects": {}, "counters": {}},
        data=None,
        per_rank={"rank": 0, "step": step},
        numerics={},
        job_uid=OWNER,
    )


def _flip(file: Path, rng: random.Random) -> None:
    place = rng.randrange(file.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ (1 << rng.randrange(8))]))


def _cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def _pad(file: Path, rng: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(bytes(rng.randrange(1, 10000)))


def _lose(file: Path, rng: random.Random) -> None:
    file.unlink()


def _age(file: Path, rng: random.Random) -> None:
    shutil.copyfile(file.parent.with_name(file.parent.name.replace(str(NEW), str(OLD), 1)) / file.name, file)


def _tear(file: Path, rng: random.Random) -> None:
    """Leave the file as a disk does that lost power after it acknowledged the write."""
    size = file.stat().st_size
    begin = rng.randrange(size)
    with file.open("r+b") as opened:
        opened.seek(begin)
        rest = bytes(min(4096, size - begin))
        if opened.read(len(rest)) == rest:  # the bytes are zeros already: change them
            rest = b"\xff" * len(rest)
        opened.seek(begin)
        opened.write(rest)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "one bit flipped": _flip,
    "a file cut short": _cut,
    "a file padded": _pad,
    "a file missing": _lose,
    "a file of an older step": _age,
    "a page of zeros": _tear,
}


def one(folder: Path, seed: int, number: int) -> str:
    """Corrupt a checkpoint and restore. Return the failure, or an empty string."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311
    kind = [*DAMAGES][number % len(DAMAGES)]
    name = str(CheckpointName(step=NEW, attempt_id=AttemptId(1, 1)))
    root = folder / "damaged"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(folder / "whole", root)
    file = root / name / rng.choice(_FILES)
    DAMAGES[kind](file, rng)
    what = f"{kind}, {file.name}, trial {number}"
    found = restore(root, SingleRank(), job_uid=OWNER)
    if found.step != OLD or found.loaded is None:
        return f"{what}: step {found.step} was restored"
    if {name: bytes(data) for name, data in found.loaded.tensors.items()} != contents(OLD):
        return f"{what}: the older step was restored with other bits"
    if [bad.path for bad in found.quarantined] != [name]:
        return f"{what}: {found.quarantined} was moved aside"
    return ""


def drill(folder: Path, *, seed: int, trials: int) -> list[str]:
    """Return the failures of this many trials."""
    for step in (OLD, NEW):
        result = save(folder / "whole", snapshot(step), SingleRank())
        if not result.committed:
            return [result.message]
    return [failure for number in range(trials) if (failure := one(folder, seed, number))]
