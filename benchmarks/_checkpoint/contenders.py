"""The contenders that save: Holdfast, torch's DCP, and the limits of disk and memory.

The files of an earlier save are deleted, and the disk is idle, before a clock starts. All clocks stop when the bytes
are fsynced: Holdfast's when the checkpoint is durable, DCP's (which fsyncs by default) when its call returns.
"""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.dcp.writer import StorageWriter
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.io.direct_writer import aligned
from holdfast.checkpoint.io.huge_pages import allocate, fault_in
from holdfast.checkpoint.io.staging_buffer import Arena, anonymous
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.saving.background import Saving
from holdfast.checkpoint.saving.finite_check import Inspection
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import stage
from holdfast.checkpoint.state.flatten import Stateful, flatten
from holdfast.core.attempt import AttemptId

CHUNK = 8 << 20
TENSORS = 628
LETTING_GO_SECONDS = 0.2


class State:
    """Tensors like those of a model and its optimizer: few large ones, many small ones."""

    def __init__(self, nbytes: int, dtype: torch.dtype, count: int = TENSORS) -> None:
        generator = torch.Generator().manual_seed(1)
        large = count // 4
        small = nbytes // (count * 16)
        sizes = [(nbytes - small * (count - large)) // large] * large + [small] * (count - large)
        items = [size // dtype.itemsize for size in sizes]
        self.tensors = {
            f"layers.{n}.weight": torch.randn(count, generator=generator).to(dtype) for n, count in enumerate(items)
        }
        self.nbytes = sum(tensor.numel() * dtype.itemsize for tensor in self.tensors.values())

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the state to save."""
        return self.tensors

    def load_state_dict(self, state: Any, /) -> None:
        """Load nothing."""


@dataclass
class Ours:
    """An engine as `job.step` uses it, with its own folder."""

    root: Path
    state: Stateful
    full_every: int = 1

    def __post_init__(self) -> None:
        self._step = 0
        self.start()

    def start(self) -> None:
        """Start like a new process: nothing is staged yet, and memory is prepared as after the first step."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._engine = CheckpointManager(
            self.root, keep_last=1, resume=Resume.ALWAYS, on_foreign=print, full_every=self.full_every
        )
        self._engine.enter(
            Attempt(attempt_id=AttemptId(1, 1), job_uid="bench", publication="p", run_id="r"), SingleRank()
        )
        self._engine.prepare(flatten({"model": self.state}).specs)
        self._engine._arena._settle()

    def forget(self) -> None:
        """Release the memory."""
        del self._engine

    def begin(self, told: Callable[[SaveResult], None] = lambda result: None) -> Saving:
        """Perform everything for which training waits."""
        return self._engine.begin(self._snapshot(), told)

    def _snapshot(self) -> Snapshot:
        self._step += 1
        flat = flatten({"model": self.state})
        return Snapshot(
            name=CheckpointName(step=self._step, attempt_id=AttemptId(1, 1)),
            specs=flat.specs,
            read=flat.read,
            fill=flat.fill,
            weights=frozenset(list(flat.tensors)[::3]),  # the others are the moments of an optimizer
            state={"objects": flat.tree},
            data=None,
            per_rank={},
            numerics={},
        )

    def checker(self) -> Callable[[], None]:
        """Return a call that checks a copy of the weights for values that are not finite, as each save does."""
        snapshot = self._snapshot()
        staged = stage(snapshot, Arena(), Planner(), rank=0, size=1)
        staged.filling.wait(staged.plan.nbytes, lambda: None)
        image = staged.image[: staged.plan.nbytes]
        return lambda: Inspection(staged.plan, snapshot.weights).update(image)

    def stall(self) -> float:
        """Return the seconds until training continues."""
        idle()
        began = time.perf_counter()
        saving = self.begin()
        seconds = time.perf_counter() - began
        finish(saving)
        return seconds

    def first_stall(self) -> float:
        """Return the seconds until training continues after a process's first save."""
        self.start()
        return self.stall()

    def save(self, told: Callable[[SaveResult], None] = lambda result: None) -> float:
        """Return the seconds until the checkpoint is durable, including the copy."""
        idle()
        ended: list[float] = []

        def done(result: SaveResult) -> None:
            ended.append(time.perf_counter())
            told(result)

        began = time.perf_counter()
        finish(self.begin(done))
        return ended[0] - began


class OnTheNode(Ours):
    """The local tier: as for a job of one node, the earlier checkpoint stays until the new one is durable."""

    def start(self) -> None:
        """Start with a folder on the measured disk, as a launcher does."""
        super().start()
        node = {"node": "a", "pod": "a", "host": "127.0.0.1", "port": 1}
        said = {"folder": str(self.root / "node"), "limit": None, "interval": 1, "perSecond": None, "me": node}
        said["key"] = "00" * 32
        self._engine.enter_tiers({"local": said}, [{"local": said}], 0, lambda: None)

    def begin(self, told: Callable[[SaveResult], None] = lambda result: None) -> Saving:
        """Perform everything for which training waits."""
        return self._engine.begin_on(self._engine.tiers[0], self._snapshot(), told)


def at_hand(nbytes: int) -> None:
    """Let the system allocate this much memory at once. If a virtual machine's host takes free memory back, memory
    that was released just now is still there."""
    fault_in(allocate(nbytes + nbytes // 8))


def idle() -> None:
    """Wait until the disk is idle and the previous contestant's memory is released. DCP's thread releases a gigabyte
    after its future has ended, which delays other uses of memory."""
    os.sync()
    gc.collect()
    time.sleep(LETTING_GO_SECONDS)


def finish(saving: Saving) -> None:
    """Wait for the save, and raise if it failed."""
    saving.settle(lambda: None)
    if not saving.result.committed:
        raise SystemExit(saving.result.message)


@dataclass
class Dcp:
    """`torch.distributed.checkpoint` with its defaults."""

    root: Path
    state: State

    def _fresh(self) -> Path:
        shutil.rmtree(self.root, ignore_errors=True)
        idle()
        return self.root

    def save(self) -> float:
        """Return the seconds of `dcp.save`."""
        folder = self._fresh()
        began = time.perf_counter()
        dcp.save(dict(self.state.tensors), checkpoint_id=folder)
        return time.perf_counter() - began

    def begin(self) -> Any:
        """Start `dcp.async_save`."""
        return dcp.async_save(dict(self.state.tensors), checkpoint_id=self._fresh())

    def stall(self) -> float:
        """Return the seconds until `dcp.async_save` returns."""
        folder = self._fresh()
        began = time.perf_counter()
        future = dcp.async_save(dict(self.state.tensors), checkpoint_id=folder)
        seconds = time.perf_counter() - began
        future.result()
        return seconds


@dataclass
class Through(Dcp):
    """`dcp.save` with Holdfast's StorageWriter, which publishes checkpoints and computes digests."""

    def save(self) -> float:
        """Return the seconds of `dcp.save`."""
        folder = self._fresh()
        began = time.perf_counter()
        dcp.save(dict(self.state.tensors), storage_writer=StorageWriter(folder, step=1))
        return time.perf_counter() - began

    def forget(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.root, ignore_errors=True)


@dataclass
class OneFile:
    """A library that writes all tensors to one file, without a digest or atomic publication; fsynced here."""

    path: Path
    state: State
    write: Callable[[dict[str, torch.Tensor], Path], object]

    def save(self) -> float:
        """Return the seconds until the file is on the disk."""
        self.path.unlink(missing_ok=True)
        idle()
        began = time.perf_counter()
        self.write(dict(self.state.tensors), self.path)
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return time.perf_counter() - began

    def forget(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)


class Copy:
    """The memory's limit: each tensor is copied to memory that is already allocated."""

    def __init__(self, state: State) -> None:
        self._pairs = [(tensor, torch.zeros_like(tensor)) for tensor in state.tensors.values()]

    def __call__(self) -> float:
        """Return the seconds."""
        idle()
        began = time.perf_counter()
        for source, target in self._pairs:
            target.copy_(source)
        return time.perf_counter() - began


class Disk:
    """The disk's limit: two threads write the same bytes from allocated memory past the page cache, fsynced."""

    def __init__(self, path: Path, state: State) -> None:
        self._path = path
        self._data = anonymous(aligned(state.nbytes))
        at = 0
        for tensor in state.tensors.values():
            source = memoryview(tensor.view(torch.uint8).numpy())
            self._data[at : at + source.nbytes] = source
            at += source.nbytes

    def __call__(self) -> float:
        """Return the seconds."""
        self._path.unlink(missing_ok=True)
        idle()
        began = time.perf_counter()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(self._path, flags | os.O_DIRECT)
        except OSError:
            self._path.unlink(missing_ok=True)
            fd = os.open(self._path, flags)
        try:
            halves = [threading.Thread(target=self._write, args=(fd, half)) for half in range(2)]
            for half in halves:
                half.start()
            for half in halves:
                half.join()
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - began

    def _write(self, fd: int, half: int) -> None:
        for begin in range(half * CHUNK, self._data.nbytes, 2 * CHUNK):
            os.pwrite(fd, self._data[begin : begin + CHUNK], begin)


class Training:
    """A loop with steps of some milliseconds on one thread."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(512, 512), torch.randn(512, 512)

    def step(self) -> None:
        """Make one step."""
        for _ in range(2):
            torch.mm(self._a, self._b)

    def pace(self, ended: Callable[[], bool], least: int) -> float:
        """Return the mean seconds per step until `ended`, over at least `least` steps."""
        began, count = time.perf_counter(), 0
        while count < least or not ended():
            self.step()
            count += 1
        return (time.perf_counter() - began) / count


def seconds(act: Callable[[], object]) -> float:
    """Return the wall-clock seconds of a call."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def cpu_seconds(act: Callable[[], object]) -> float:
    """Return the CPU seconds of this process during a call, over all threads, including system time."""
    began = time.process_time()
    act()
    return time.process_time() - began


def extra_bytes(act: Callable[[], object]) -> float:
    """Return by how much the process's peak memory grows during a call."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _resident("VmRSS")
    act()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{field}:"))


@contextmanager
def workplace(root: Path) -> Iterator[Path]:
    """Create a folder on the measured disk, and delete it afterwards."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
