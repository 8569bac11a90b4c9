"""Starts a job of each kind, finds its processes, and restarts lost ones."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from _recovery.observer import Trace, healthy_steps, latest
from holdfast_testbed.node.processes import die_with_parent
from holdfast_testbed.ports import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("HOLDFAST_CACHE") or ROOT / ".cache")
PEERS = CACHE / "bench-peers"
PEER_LIST = HERE.parent / "peers.txt"
STEPS = 1_000_000
QUIET_SECONDS = 1.0
QUIET_TICKS = 3  # hundredths of a second


class TrialFailedError(Exception):
    """A job did not reach the expected state."""


class Job(ABC):
    """A running job of one contender."""

    full = 2

    def __init__(self) -> None:
        memory = Path("/dev/shm")  # noqa: S108 - every contender's files are in memory, so that no disk is measured
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=memory if memory.is_dir() else None))
        self.trace = Trace(self.folder / "trace")
        self._processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def begin(self) -> None:
        """Start its processes."""

    def revive(self) -> None:  # noqa: B027 - most need nothing
        """Restart what the contender does not restart by itself."""

    def end_victim(self, pid: int) -> None:  # noqa: B027 - most do it themselves
        """End a process that hangs, where the contender never would."""

    def lose_launcher(self) -> None:
        """Kill a whole launcher with its ranks."""
        raise RuntimeError(f"{type(self).__name__} has no launcher that could be lost")

    def start(self) -> None:
        """Start, and wait until it trains."""
        self.begin()
        self.await_healthy(since=time.monotonic_ns(), seconds=120)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self._processes:
            process.wait()
        for pid in self._ours():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # processes that outlived their parent
        shutil.rmtree(self.folder, ignore_errors=True)

    def pid(self, rank: int) -> int:
        """Return the PID of this rank."""
        self.trace.read()
        return latest(self.trace.lines)[rank].pid

    def order(self, rank: int, kind: str) -> None:
        """Let a rank fail in its loss function."""
        beside = self.folder / f".order-{rank}"
        beside.write_text(kind)
        beside.rename(self.folder / f"order-{rank}")

    def wait_for(self, condition: Callable[[], bool], what: str, *, seconds: float) -> None:
        """Wait until the trace meets the condition."""
        end = time.monotonic() + seconds
        while True:
            self.trace.read()
            if condition():
                return
            if time.monotonic() > end:
                raise TrialFailedError(f"{type(self).__name__}: not within {seconds:.0f} s: {what}\n{self.tail()}")
            time.sleep(0.01)

    def await_healthy(self, *, since: int, seconds: float = 60.0) -> None:
        """Wait until all ranks of a full world have trained further steps."""
        self.wait_for(
            lambda: healthy_steps(self.trace.lines, since=since, full=self.full) >= 10,
            f"10 steps of {self.full} ranks",
            seconds=seconds,
        )

    def await_quiet(self) -> None:
        """Wait until only launchers and ranks use the CPU: standby processes are then ready for a fault."""
        end = time.monotonic() + 60
        before = self._others_ticks()
        while time.monotonic() < end:
            time.sleep(QUIET_SECONDS)
            now = self._others_ticks()
            if now.keys() == before.keys() and sum(now.values()) - sum(before.values()) <= QUIET_TICKS:
                return
            before = now

    def warm(self) -> list[int]:
        """Return the standby processes."""
        return sorted(pid for pid in self._ours() if _comm(pid) == "holdfast-warm")

    def _others_ticks(self) -> dict[int, int]:
        """Return the CPU time of each process that is neither started here nor a rank."""
        self.trace.read()
        known = {process.pid for process in self._processes} | {
            line.pid for line in latest(self.trace.lines).values()
        }
        found = {}
        for pid in self._ours() - known:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = int(fields[11]) + int(fields[12])
        return found

    def _ours(self) -> set[int]:
        """Return all processes of this job, including indirect children."""
        mark = f"BENCH_FOLDER={self.folder}\0".encode()
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    found.add(int(process.name))
        return found

    def tail(self) -> str:
        """Return the ends of its logs."""
        return "".join(f"--- {log.name}\n{log.read_text()[-1500:]}\n" for log in sorted(self.folder.glob("*.log")))

    def launch(self, name: str, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start a process that the kernel kills when this one ends."""
        base = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("HOLDFAST_", "TORCH"))},
            "BENCH_FOLDER": str(self.folder),
            "BENCH_FULL": str(self.full),
            "BENCH_STEPS": str(STEPS),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words,
                env=base | environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one call into libc
            )
        self._processes.append(process)
        return process


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class OneLauncher(Job):
    """Holdfast: one launcher with two ranks."""

    script = HERE / "with_holdfast.py"
    options: tuple[str, ...] = ()

    def begin(self) -> None:
        self._launcher(
            "launcher", "--nproc-per-node", "2", *self.options, HOLDFAST_RUN_DIR=str(self.folder / "run-0")
        )

    def recoveries(self) -> list[dict[str, float]]:
        """Return the phases of each recovery in seconds, from the first launcher's timeline."""
        timeline = self.folder / "run-0" / "timeline.jsonl"
        lines = [json.loads(line) for line in timeline.read_text().splitlines()] if timeline.exists() else []
        return [line["phases"] for line in lines if line["kind"] == "recovery"]

    def _launcher(self, name: str, *options: str, **environ: str) -> subprocess.Popen[bytes]:
        script = str(self.script)
        tight = ("--hang-min-timeout", "1")
        command = ["run", "--max-restarts", "1000", "--checkpoint-interval", "100", *tight, *options]
        return self.launch(
            name,
            *(sys.executable, "-m", "holdfast", *command, "--", sys.executable, script),
            HOLDFAST_CHECKPOINT_DIR=str(self.folder / "checkpoints"),
            **environ,
        )


class OneLauncherNoWarm(OneLauncher):
    """Holdfast without a warm process: a zygote forks one when needed."""

    options = ("--warm-processes", "0")


class ThreeLaunchers(OneLauncher):
    """Holdfast: three launchers with one rank each, like three pods; two continue without the third."""

    full = 3

    def begin(self) -> None:
        self._port = free_port()
        self._member(0)  # the first one owns the endpoint and is never the lost one
        status = self.folder / "run-0" / "status.json"
        self.wait_for(status.exists, "the first launcher", seconds=30)
        for number in range(1, self.full):
            self._member(number)

    def revive(self) -> None:
        if len(self._processes) < self.full:
            self._member(2)

    def lose_launcher(self) -> None:
        victim = self._processes.pop()
        victim.kill()
        victim.wait()

    def _member(self, number: int) -> None:
        endpoint = f"127.0.0.1:{self._port}"
        run_dir = self.folder / f"run-{number}"
        shutil.rmtree(run_dir, ignore_errors=True)
        options = ("--nnodes", "2:3", "--rdzv-endpoint", endpoint)
        self._launcher(f"launcher-{number}", *options, HOLDFAST_RUN_DIR=str(run_dir))


class Torchrun(Job):
    """torchrun, which restarts all processes. It writes a checkpoint after every step."""

    every = 1
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # noqa: RUF012 - never changed

    def begin(self) -> None:
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1000"]
        script = str(HERE / "with_ddp.py")
        run = [sys.executable, "-m", "torch.distributed.run", *options, script]
        self.launch("torchrun", *run, BENCH_EVERY=str(self.every), **self.environ)


class StockTorchrun(Torchrun):
    """torchrun unmodified: all attempts share one store."""

    environ = {}  # noqa: RUF012 - never changed


class TorchrunEveryTen(Torchrun):
    """torchrun with a checkpoint every ten steps, which suits it better over a long time."""

    every = 10


class Torchft(Job):
    """torchft with two replicas and its lighthouse's defaults. The observer restarts replicas."""

    lighthouse: tuple[str, ...] = ()

    def begin(self) -> None:
        self._port = free_port()
        bind = ("--bind", f"127.0.0.1:{self._port}", "--min_replicas", "1")
        self.launch("lighthouse", str(PEERS / "bin" / "torchft_lighthouse"), *bind, *self.lighthouse)
        self._replicas = {rank: self._replica(rank) for rank in range(self.full)}

    def revive(self) -> None:
        for rank, process in self._replicas.items():
            if process.poll() is not None:
                self._replicas[rank] = self._replica(rank)

    def end_victim(self, pid: int) -> None:
        for process in self._replicas.values():
            if process.pid == pid:
                process.kill()
                process.wait()

    def _replica(self, rank: int) -> subprocess.Popen[bytes]:
        python = str(PEERS / "bin" / "python")
        address = f"http://127.0.0.1:{self._port}"
        script = str(HERE / "with_torchft.py")
        return self.launch(f"replica-{rank}", python, script, BENCH_RANK=str(rank), TORCHFT_LIGHTHOUSE=address)


class TunedTorchft(Torchft):
    """torchft with a lighthouse that considers a replica lost after 0.3 s."""

    lighthouse = ("--heartbeat_timeout_ms", "300")


class ThreeReplicas(Torchft):
    """torchft with three replicas, two of which continue."""

    full = 3


class TunedThreeReplicas(TunedTorchft):
    """The same with the shorter heartbeat."""

    full = 3


@contextlib.contextmanager
def running(kind: type[Job]) -> Iterator[Job]:
    """Start a job that trains, and end it afterwards."""
    job = kind()
    try:
        job.start()
        yield job
    finally:
        job.stop()


@cache
def torchft_is_here() -> str:
    """Install torchft into a separate environment that includes this one. Return the error; empty if it works."""
    python = PEERS / "bin" / "python"
    check = [str(python), "-c", "import torchft"]
    if python.exists() and subprocess.run(check, capture_output=True, check=False).returncode == 0:
        return ""
    shutil.rmtree(PEERS, ignore_errors=True)
    packages = PEERS / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    for command in (
        [sys.executable, "-m", "venv", str(PEERS)],
        [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), "-r", str(PEER_LIST)],
        check,
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"torchft cannot be installed: {done.stderr.strip().splitlines()[-1][:80]}"
        (packages / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return ""


@cache
def no_warm_option() -> str:
    """Return why the launcher cannot run without a warm process; empty if it can."""
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "--help"], capture_output=True, text=True, check=False
    )
    return "" if "--warm-processes" in shown.stdout else "this launcher has no --warm-processes"
