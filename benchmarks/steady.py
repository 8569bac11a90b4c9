"""The cost of a step without failures, relative to torch's DDP, on two ranks.

Both ranks contain every contestant, each with its own model and groups, and run them in turns. A block has four turns
(DDP, other, other, DDP, or the reverse, at random), so that a drift of the machine's speed favours no contestant. A
ratio is computed within a block. `--full` appends its blocks to a file and continues where it was stopped.

Two further ranks train with and without Holdfast's guards, also in blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import _bench as bench
from _recovery.contenders import PEERS, torchft_is_here
from _steady import guards
from _steady.workload import SHAPES, parameters
from torch.distributed import TCPStore

from holdfast_testbed.ports import free_port

RANKS = Path(__file__).resolve().parent / "_steady"
BAR = "recovery-8"
LOG = bench.OUT / "steady.log"
TARGET = "<= 1.03"
CONTESTANTS = {"loop": "job.step", "averaging": "averages, ballot and vote alone", "torchft": "torchft"}
# Steps per turn: enough to make overhead negligible, few enough for many blocks.
STEPS = {"3.7 M": 6, "29 M": 1}
GUARDED_STEPS = {"3.7 M": 2, "29 M": 1, "29 M, 1 sample": 1}
PATIENCE = 120.0


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """Start torchft's lighthouse, which its replica groups use to meet, and yield its address."""
    port = free_port()
    bind = f"127.0.0.1:{port}"
    command = [
        str(PEERS / "bin" / "torchft_lighthouse"),
        "--bind",
        bind,
        "--min_replicas",
        "2",
        "--join_timeout_ms",
        "10000",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + PATIENCE
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if time.monotonic() > end:
                    raise SystemExit("torchft's lighthouse never listened")
                time.sleep(0.05)
            yield f"http://{bind}"
        finally:
            process.kill()


def measure(shape: str, blocks: int, names: list[str], trials: bench.Trials) -> None:
    """Run two ranks with these contestants for their blocks, and keep the values as they arrive."""
    with contextlib.ExitStack() as stack:
        environ = dict(os.environ)
        if "torchft" in names:
            environ["TORCHFT_LIGHTHOUSE"] = stack.enter_context(lighthouse())
        python = str(PEERS / "bin" / "python") if "torchft" in names else sys.executable
        words = ["--shape", shape, "--blocks", str(blocks), "--steps", str(STEPS[shape]), *names]
        run([python, str(RANKS / "rank.py"), *words], shape, environ, trials)


def measure_guards(shape: str, blocks: int, trials: bench.Trials) -> None:
    """Run two ranks with and without guards for their blocks, and keep the values as they arrive."""
    bench.OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=bench.OUT) as folder:
        words = ["--shape", shape, "--blocks", str(blocks), "--steps", str(GUARDED_STEPS[shape]), "--folder", folder]
        run([sys.executable, str(RANKS / "guards_rank.py"), *words], shape, dict(os.environ), trials)


def run(command: list[str], shape: str, environ: dict[str, str], trials: bench.Trials) -> None:
    """Run two ranks until they end."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack, LOG.open("w") as log:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [stack.enter_context(rank(command, number, store.port, environ, log)) for number in (0, 1)]
        assert ranks[0].stdout is not None  # noqa: S101 - it is a pipe
        for line in ranks[0].stdout:
            keep(shape, json.loads(line), trials)
        if any(process.wait() for process in ranks):
            raise SystemExit(f"a rank failed; its last words:\n{LOG.read_text()[-3000:]}")


@contextlib.contextmanager
def rank(
    command: list[str], number: int, port: int, environ: dict[str, str], log: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """Start one rank, which the kernel kills when its parent ends."""
    place = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    words = [*command, "--rank", str(number), "--port", str(port)]
    with subprocess.Popen(words, env=environ | place, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def keep(shape: str, said: dict[str, Any], trials: bench.Trials) -> None:
    """Keep one block of one contestant, or values of another kind."""
    for what in ("wall", "cpu") if "wall" in said else ():
        ours, peer = said[what]
        trials.keep(f"{shape} {said['name']} {what}", ours / peer)
        trials.keep(f"{shape} {said['name']} {what} peer", peer)
    for what, value in said.get("values", {}).items():
        trials.keep(f"{shape} {said['name']} {what}", value)


def rows(shape: str, names: list[str], trials: bench.Trials) -> list[bench.Measurement]:
    """Return the rows of one model: the judged bound, and its data."""
    size = size_of(shape)
    values = {name: trials.collect(f"{shape} {name} wall", 0, float) for name in names}
    peer = bench.median(values["torchft"]) if values.get("torchft") else None
    peer_name = "torchft ÷ DDP" if peer else ""
    found = []
    for name in names:
        if not values[name]:
            continue
        title = f"{CONTESTANTS[name]} ÷ DDP, {size}"
        line = bench.measured(BAR, title, values[name], "x", peer=peer, peer_name=peer_name, limit=1.0)
        found.append(line)
        if name == "loop":
            upper = bench.bound(values[name])
            title = f"{title}: 95 % bound of the mean"
            found.append(replace(line, what=title, ours=upper, target=TARGET, held=bench.meets(upper, TARGET)))
        cpu = trials.collect(f"{shape} {name} cpu", 0, float)
        found.append(bench.measured(BAR, f"{CONTESTANTS[name]} ÷ DDP, {size}: CPU time", cpu, "x"))
    seconds = trials.collect(f"{shape} {names[0]} wall peer", 0, float)
    found.append(bench.measured(BAR, f"a step of DDP, {size}", [1000 * one for one in seconds], "ms"))
    return found


def size_of(shape: str) -> str:
    """Return the size of a model, and its batch if that is not the usual one."""
    _, _, batch = shape.partition(", ")
    return f"{parameters(SHAPES[shape]) / 1e6:.1f} M parameters" + (f", {batch}" if batch else "")


def guarded(effort: bench.Effort, trials: bench.Trials) -> list[bench.Measurement]:
    """Return the rows of the guards."""
    found: list[bench.Measurement] = []
    for shape in list(GUARDED_STEPS)[:1] if effort.quick else GUARDED_STEPS:
        wanted = effort.pick(quick=2, default=20, full=100)
        missing = wanted - len(trials.values(f"{shape} save cpu unchecked"))
        if missing > 0:
            measure_guards(shape, missing, trials)
        found += guards.rows(shape, size_of(shape), trials)
    return found


def main() -> int:
    effort = bench.arguments(__doc__ or "")
    trials = bench.Trials("steady", effort)
    absent = "left out of --quick" if effort.quick else torchft_is_here()
    names = [name for name in CONTESTANTS if name != "torchft" or not absent]
    found: list[bench.Measurement] = []
    for shape in list(STEPS)[:1] if effort.quick else STEPS:
        wanted = effort.pick(quick=2, default=30, full=100)
        missing = wanted - len(trials.collect(f"{shape} {names[-1]} wall", 0, float))
        if missing > 0:
            measure(shape, missing, names, trials)
        found += rows(shape, names, trials)
    if absent:
        found.append(bench.not_measured(BAR, "torchft ÷ DDP", absent))
    found += guarded(effort, trials)
    return bench.finish("steady", found, effort)


if __name__ == "__main__":
    sys.exit(main())
