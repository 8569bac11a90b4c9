"""Ranks of an attempt of a job without torch, forked from this process, which has loaded all modules.

Each rank restores, claims, waits until it is traced, and then saves a step as a job does: `begin` in the caller, the
rest in a thread. A JSON line is the request. One line reports the process IDs, an empty line releases them, and one
line reports how each rank has ended and its output.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.direct_writer import ImageWriter
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import PeerLostError

Forms = dict[str, tuple[str, tuple[int, ...]]]
# Three chunks of 8 MiB, or two chunks each for two ranks; large enough for slice digests, also in a delta.
LARGE: Forms = {"body": ("U8", (17, 1 << 20)), "head": ("U8", (64,))}
SMALL: Forms = {"body": ("U8", (64, 1 << 14)), "inexact": ("F32", (64, 1 << 10))}
KINDS: dict[str, tuple[Forms, int]] = {"large": (LARGE, 1), "deltas": (SMALL, 8)}
_CHANGED = 20
_THRESHOLD = 1e-3
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class Twins:
    """Two ranks with a socket between them. `fated`: the one ends with the other."""

    size = 2

    def __init__(self, rank: int, one: socket.socket, *, fated: bool) -> None:
        self.rank, self._fated = rank, fated
        self._says, self._hears = one.makefile("w"), one.makefile("r")

    def gather(self, value: Any) -> list[Any]:
        try:
            self._says.write(json.dumps(value) + "\n")
            self._says.flush()
            line = self._hears.readline()
        except OSError:
            line = ""
        if not line:
            if self._fated:
                os.kill(os.getpid(), signal.SIGKILL)
            raise PeerLostError("the other rank is gone")
        values = [value, json.loads(line)]
        return values if self.rank == 0 else values[::-1]

    def share(self, value: Any) -> Any:
        return self.gather(value)[0]

    def close(self) -> None:
        self._says.close()
        self._hears.close()


def snapshot(kind: str, step: int, attempt_id: AttemptId) -> Snapshot:
    """Return rows that change at each step, and floats that move a little. One in a hundred moves far."""
    forms, _ = KINDS[kind]
    state: dict[str, Any] = {}
    for name, (dtype, shape) in forms.items():
        if dtype == "U8":
            state[name] = np.resize(np.arange(251, dtype=np.uint8), shape)
            state[name][:_CHANGED] += np.uint8(step)
        else:
            state[name] = np.resize(np.arange(1000, dtype=np.float32), shape) / 1000 + np.float32(step * 1e-6)
            state[name][:, ::100] += step

    def read(piece: Any) -> bytes:
        return bytes(state[piece.spec.name][piece.start[0] : piece.start[0] + piece.shape[0]].tobytes())

    return Snapshot(
        name=CheckpointName(step=step, attempt_id=attempt_id),
        specs=[TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in forms.items()],
        read=read,
        state={"objects": {"step": step}, "counters": {}},
        data=None,
        per_rank={"step": step},
        numerics={},
        inexact=frozenset({"inexact"} & forms.keys()),
    )


def run(
    wanted: dict[str, Any],
    exchange: Exchange,
    ready: Callable[[], None] = lambda: None,
    announce: Callable[[str], None] = lambda said: None,
) -> None:
    """Run an attempt: restore, claim, and save. Report `ready` before the last step."""
    kind, steps = wanted["kind"], wanted["steps"]
    attempt = Attempt(attempt_id=AttemptId(1, wanted["attempt"]), job_uid="job-1", publication="p1", run_id="run")
    every = KINDS[kind][1]
    engine = CheckpointManager(
        Path(wanted["root"]),
        keep_last=2,
        resume=Resume.ALWAYS,
        on_foreign=print,
        full_every=every,
        delta_threshold=_THRESHOLD if every > 1 else 0.0,
    )
    engine.enter(attempt, exchange)
    found = engine.restore()
    engine.claim(step=found.step, attempt_id=found.attempt_id)
    for step in steps:
        made = snapshot(kind, step, attempt.attempt_id)
        if step == steps[-1]:
            ready()
        saving = engine.begin(made)
        saving.settle(lambda: None)
        if saving.lost:
            announce(f"lost {step}")
            return
        result = saving.result
        announce(f"committed {step}" if result.committed else f"failed {step}: {result.message}")


def write_by_several_threads() -> None:
    """Keep the thread with the first chunk of a file until another thread has the next one."""
    write, continued = ImageWriter._write, set[Path]()

    def written(image: ImageWriter, begin: int) -> None:
        if begin:
            continued.add(image.path)
        write(image, begin)
        while not begin and image.nbytes > CHUNK_BYTES and image.path not in continued and not image._stopped:
            time.sleep(0.001)

    ImageWriter._write = written  # type: ignore[method-assign]


def rank(wanted: dict[str, Any], exchange: Exchange, waits: int, told: int) -> None:
    """Run one rank to its end."""
    write_by_several_threads()
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY)

    def ready() -> None:
        os.write(told, b"ready\n")
        os.read(waits, 1)

    def announce(said: str) -> None:
        os.write(told, f"{said}\n".encode())

    run(wanted, exchange, ready, announce)


def forked(wanted: dict[str, Any], exchange: Exchange, others: list[int]) -> tuple[int, int, int]:
    """Return the process ID, the pipe that releases it, and that of its output. Close descriptors of `others`."""
    (waits, go), (hears, told) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for fd in (go, hears, *others):
                os.close(fd)
            rank(wanted, exchange, waits, told)
            os._exit(0)
        except BaseException:  # noqa: BLE001  (told, and the end of it)
            os.write(told, traceback.format_exc().encode())
        finally:
            os._exit(1)
    os.close(waits)
    os.close(told)
    return child, go, hears


def heard(hears: int, last: bytes = b"\n\n") -> str:
    """Return the output up to these words or to its end."""
    said = b""
    while not said.endswith(last) and (more := os.read(hears, 1 << 16)):
        said += more
    return said.decode()


def attempt(wanted: dict[str, Any]) -> None:
    """Run all ranks of one attempt: start them, report that they are ready, release them, report how they ended."""
    ends = socket.socketpair() if wanted["ranks"] == 2 else ()
    twins = [Twins(number, one, fated=wanted["fated"]) for number, one in enumerate(ends)]
    made: list[tuple[int, int, int]] = []
    for number, exchange in enumerate(twins or [SingleRank()]):
        own = [one.fileno() for n, one in enumerate(ends) if n != number]
        made.append(forked(wanted, exchange, [*own, *(fd for _, *fds in made for fd in fds)]))
    for one in (*twins, *ends):
        one.close()
    said = [heard(hears, b"ready\n") for _, _, hears in made]
    print(json.dumps({"pids": [pid for pid, _, _ in made], "said": said}), flush=True)
    sys.stdin.readline()
    for _, go, _ in made:
        os.close(go)
    statuses = [os.waitpid(pid, 0)[1] for pid, _, _ in made]
    said = [heard(hears) for _, _, hears in made]
    for _, _, hears in made:
        os.close(hears)
    print(json.dumps({"statuses": statuses, "said": said}), flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        attempt(json.loads(line))
