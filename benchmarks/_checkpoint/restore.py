"""The cost of a restore: the time of a cold, fully verified one, and the bytes that another world size reads."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import _bench as bench
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from _checkpoint.contenders import at_hand, cpu_seconds, extra_bytes, seconds
from holdfast import checkpoint
from holdfast.checkpoint.dcp.reader import StorageReader
from holdfast.checkpoint.dcp.writer import StorageWriter
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import Holding, Piece, TensorSpec
from holdfast.checkpoint.format.shard_layout import rows as rows_of
from holdfast.checkpoint.io.huge_pages import allocate
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.writer import save
from holdfast.checkpoint.stores.folder import FolderSource, FolderStore
from holdfast.core.attempt import AttemptId

CHUNK = 8 << 20
LARGE, SMALL, WIDTH = 157, 471, 1024
RESHARDS = ((2, 4), (4, 2), (2, 3))
Acts = dict[str, Callable[[], None]]
Measure = Callable[[Callable[[], object]], float]
FILES = ("safetensors", "torch.load")
TAKEN = "ours, memory reclaimed"
TAKEN_SECONDS = 4.0  # longer than the two seconds after which a host may take free memory back
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class State:
    """Tensors like those of a model and its optimizer: few large ones, many small ones."""

    def __init__(self, nbytes: int, *, fill: bool, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype) if fill else torch.empty(shape, dtype=dtype)

        height = nbytes // (LARGE * WIDTH * dtype.itemsize)
        self.tensors = {f"layers.{n}.weight": make(height, WIDTH) for n in range(LARGE)}
        self.tensors |= {f"layers.{n}.bias": make(WIDTH) for n in range(SMALL)}

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the state to save."""
        return self.tensors

    def load_state_dict(self, state: Any, /) -> None:
        """Load nothing."""


class Empty:
    """An object without state until it loads one, which it keeps, as an optimizer does."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, torch.Tensor] = {}

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the loaded state."""
        return self.tensors

    def load_state_dict(self, state: Any, /) -> None:
        """Keep the state."""
        self.tensors = state


def rows(folder: Path, nbytes: int, rounds: int) -> list[bench.Measurement]:
    """Return all rows; `folder` is on the measured disk."""
    found = [row for name in DTYPES for row in cold(folder, nbytes, rounds, name)]
    return [*found, *(reshard(folder, nbytes, *sizes) for sizes in RESHARDS)]


def cold(folder: Path, nbytes: int, rounds: int, name: str) -> list[bench.Measurement]:
    """Return the rows of restores without the page cache, by default with fresh memory allocated first."""
    write_all(folder, State(nbytes, fill=True, dtype=DTYPES[name]))
    target = State(nbytes, fill=False, dtype=DTYPES[name])
    for tensor in target.tensors.values():
        tensor.zero_()  # allocates its pages
    kept: list[object] = []  # releasing a gigabyte takes time that is not part of a restore

    def ours() -> None:
        kept.append(empty := Empty())
        found = checkpoint.load(folder / "ours", state=empty)
        if found is None or found.quarantined:
            raise SystemExit("the checkpoint was not restored")

    def theirs() -> None:
        dcp.load(dict(target.tensors), checkpoint_id=folder / "dcp", no_dist=True)

    def through() -> None:
        dcp.load(dict(target.tensors), storage_reader=StorageReader(folder / "through"), no_dist=True)

    files: Acts = {
        "safetensors": lambda: kept.append(touched(safetensors.torch.load_file(folder / "safetensors"))),
        "torch.load": lambda: kept.append(torch.load(folder / "torch.load", weights_only=True)),
    }
    buffers = [allocate(CHUNK) for _ in range(2)]
    commits = {whose: list((folder / whose).glob("*/*.safetensors")) for whose in ("ours", "through")}
    limits: Acts = {
        "limit": lambda: read_all(commits["ours"], buffers),
        "limit of through": lambda: read_all(commits["through"], buffers),
        TAKEN: ours,
    }
    loads: Acts = {"ours": ours, "through": through, "dcp": theirs}

    def measured(measure: Measure, acts: Acts) -> dict[str, list[float]]:
        ready = partial(make_ready, kept, nbytes)
        return bench.interleaved(
            {who: when_cold(folder, partial(ready, who), measure, acts[who]) for who in acts}, rounds
        )

    walls = measured(seconds, loads | limits | files)
    cpu, grown = measured(cpu_seconds, loads), measured(extra_bytes, loads)
    shutil.rmtree(folder)
    size = f"{nbytes / 1e9:.2g} GB of {name}"
    return [
        *cold_rows(walls, f"cold restore of {size} in {LARGE + SMALL} tensors, every byte verified"),
        *costs(cpu, grown, nbytes, size),
    ]


def cold_rows(walls: Mapping[str, list[float]], what: str) -> list[bench.Measurement]:
    """Return the rows of wall-clock time."""
    there = "into tensors that are there (dcp.load with our StorageReader)"
    return [
        *against(walls, "ours", "limit", f"{what}, into fresh memory"),
        bench.measured(
            "",
            f"{what}, into fresh memory that this machine's host had reclaimed",
            bench.ratios(walls[TAKEN], walls["limit"]),
            "x read limit",
        ),
        *(
            bench.measured(
                "",
                f"{what}, into fresh memory: over {whose}, which verifies nothing",
                bench.ratios(walls["ours"], walls[whose]),
                "x",
            )
            for whose in FILES
        ),
        *against(walls, "through", "limit of through", f"{what}, {there}"),
    ]


def write_all(folder: Path, state: State) -> None:
    """Write what is restored: a checkpoint of Holdfast, one through DCP, and the files of the others."""
    tensors = dict(state.tensors)
    checkpoint.save(folder / "ours", step=1, state=state)
    dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
    dcp.save(tensors, storage_writer=StorageWriter(folder / "through", step=1), no_dist=True)
    safetensors.torch.save_file(tensors, folder / "safetensors")
    torch.save(tensors, folder / "torch.load")


def touched(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read a byte of each page, because a library may only have mapped the file."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).view(-1)[:: mmap.PAGESIZE].sum()
    return tensors


def make_ready(kept: list[object], nbytes: int, who: str) -> None:
    """Release the last restored state, and allocate fresh memory or not."""
    kept.clear()
    if who == TAKEN:
        time.sleep(TAKEN_SECONDS)
    else:
        at_hand(nbytes)


def against(walls: Mapping[str, list[float]], whose: str, limit: str, what: str) -> list[bench.Measurement]:
    """Return the rows relative to the disk's limit for the same files, and to DCP, whose tensors are allocated."""
    return [
        bench.measured(
            "checkpoint-3",
            what,
            bench.ratios(walls[whose], walls[limit]),
            "x read limit",
            target="<= 1.25",
            peer=bench.median(bench.ratios(walls["dcp"], walls[limit])),
            peer_name="DCP, which verifies nothing",
            limit=1.0,
        ),
        bench.measured(
            "checkpoint-3", f"{what}: over DCP", bench.ratios(walls[whose], walls["dcp"]), "x", target="<= 1"
        ),
    ]


def costs(
    cpu: Mapping[str, list[float]], grown: Mapping[str, list[float]], nbytes: int, what: str
) -> Iterator[bench.Measurement]:
    """Return the rows of CPU time and memory, relative to DCP, which loads into allocated tensors."""
    for whose, how in (
        ("ours", "into fresh memory"),
        ("through", "by our StorageReader, into tensors that are there"),
    ):
        yield bench.measured(
            "checkpoint-3",
            f"processor time of a verified cold restore of {what}, {how}",
            [value / nbytes * 1e9 for value in cpu[whose]],
            "s/GB",
            peer=bench.median(cpu["dcp"]) / nbytes * 1e9,
            peer_name="DCP, which verifies nothing",
        )
        yield bench.measured(
            "checkpoint-3",
            f"memory that a verified cold restore of {what} takes at most, {how}",
            [value / nbytes for value in grown[whose]],
            "x state",
            peer=bench.median(grown["dcp"]) / nbytes,
            peer_name="DCP, into tensors that are there",
        )


def when_cold(
    folder: Path, before: Callable[[], None], measure: Callable[[Callable[[], Any]], float], act: Callable[[], Any]
) -> Callable[[], float]:
    """Return a function that measures this with nothing of the folder in the page cache."""

    def run() -> float:
        before()
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return measure(act)

    return run


def read_all(files: list[Path], buffers: list[memoryview]) -> None:
    """Read all files past the page cache with two threads into allocated memory: the disk's limit."""
    for path in files:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            fd = os.open(path, os.O_RDONLY)
        parts = [threading.Thread(target=_read_part, args=(fd, turn, buffers)) for turn in range(len(buffers))]
        for part in parts:
            part.start()
        for part in parts:
            part.join()
        os.close(fd)


def _read_part(fd: int, turn: int, buffers: list[memoryview]) -> None:
    for offset in range(turn * CHUNK, os.fstat(fd).st_size, len(buffers) * CHUNK):
        os.preadv(fd, [buffers[turn]], offset)


# Another number of ranks


def reshard(folder: Path, nbytes: int, before: int, after: int) -> bench.Measurement:
    """Return the bytes that all ranks read over the bytes that they need, for tensors sharded by rows."""
    height = nbytes // (LARGE * WIDTH * 4)
    specs = [TensorSpec(name=f"layers.{n}.weight", dtype="F32", shape=(height, WIDTH)) for n in range(LARGE)]
    specs += [TensorSpec(name=f"layers.{n}.bias", dtype="F32", shape=(WIDTH,)) for n in range(SMALL)]
    holding = Holding(names=frozenset(spec.name for spec in specs), size=before, shards=tuple(range(before)))
    root = folder / "shards"
    zeros = memoryview(mmap.mmap(-1, max(spec.nbytes for spec in specs)))

    def write(exchange: Any) -> None:
        def read(piece: Piece) -> memoryview:
            return zeros[: piece.nbytes]

        save(root, _snapshot(specs, read, holding), exchange)

    read_bytes: list[int] = []

    class Counting(FolderSource):
        def read_into(self, offset: int, target: memoryview) -> None:
            read_bytes.append(target.nbytes)
            super().read_into(offset, target)

    class Counted(FolderStore):
        def open(self, name: CheckpointName, file: str) -> FolderSource:
            return Counting(root / str(name) / file)

    def load(exchange: Any) -> int:
        wanted = {spec.name: rows_of(spec.shape[0], after, exchange.rank) for spec in specs}
        found = restore([Counted(root)], exchange, select=lambda _: wanted)
        if found.loaded is None:
            raise SystemExit("the checkpoint was not restored")
        return sum(data.nbytes for data in found.loaded.tensors.values())

    _world(before, write)
    needed = sum(_world(after, load))
    shutil.rmtree(root)
    what = f"bytes read by {after} ranks of a checkpoint by {before}, rows of {LARGE + SMALL} tensors"
    return bench.measured("checkpoint-7", what, [sum(read_bytes) / needed], "x needed", target="<= 1.05", limit=1.0)


def _snapshot(specs: list[TensorSpec], read: Callable[[Piece], memoryview], holding: Holding) -> Snapshot:
    return Snapshot(
        name=CheckpointName(step=1, attempt_id=AttemptId(1, 1)),
        specs=specs,
        read=read,
        state={"objects": {}},
        data=None,
        per_rank={},
        numerics={},
        holding=holding,
    )


class _Threads:
    """Ranks as threads of this process."""

    def __init__(self, rank: int, size: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._barrier = rank, size, values, barrier

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        self._values[self.rank] = value
        self._barrier.wait(300)
        values = list(self._values)
        self._barrier.wait(300)
        return values

    def share(self, value: Any) -> Any:
        """Return rank 0's value."""
        return self.gather(value)[0]


def _world(size: int, act: Callable[[Any], Any]) -> list[Any]:
    values, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, [_Threads(rank, size, values, barrier) for rank in range(size)]))
