"""A simulated launcher for real rank processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from torch.distributed import TCPStore

SCRIPTS = Path(__file__).parents[1] / "scripts"
SCRIPT = SCRIPTS / "train.py"
PATIENCE = 240.0
"""For what must come: on a busy host it may take long."""


@dataclass(frozen=True)
class Meeting:
    """The next world, and where its ranks meet."""

    generation: int
    attempt: int
    size: int
    port: int


class Rank:
    """A process that the helper forked, with the parts of `Popen` that tests need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.hear_out: Callable[[int], None] = lambda _: None
        """Until all that this process said is heard: its words and its end come on different ways."""
        self._code: int | None = None
        self._ended = threading.Event()

    def has_ended(self, code: int) -> None:
        self._code = code
        self._ended.set()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait for the exit code (negative for a signal). All output has been received then."""
        if not self._ended.wait(timeout) or self._code is None:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout:.0f} s")
        self.hear_out(self.pid)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Forks:
    """Fork rank processes without the seconds that each would need to load torch."""

    def __init__(self) -> None:
        words = [sys.executable, str(SCRIPTS / "forks.py")]
        # NumPy's OpenBLAS starts a thread per CPU when it is loaded. Processes with threads cannot fork safely.
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._helper = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone)
        self._ranks: dict[int, Rank] = {}
        self._begun: Queue[Rank | None] = Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def start(self, script: Path, words: Sequence[str], environ: dict[str, str], log: Path) -> Rank:
        order = {"script": str(script), "words": list(words), "environ": environ, "log": str(log)}
        assert self._helper.stdin is not None
        self._helper.stdin.write(json.dumps(order) + "\n")
        self._helper.stdin.flush()
        begun = self._begun.get(timeout=PATIENCE)
        if begun is None:
            raise RuntimeError("the helper that forks rank processes has ended: its last words are above")
        return begun

    def _listen(self) -> None:
        assert self._helper.stdout is not None
        for line in self._helper.stdout:
            said = json.loads(line)
            if "code" in said:
                self._ranks.pop(said["pid"]).has_ended(said["code"])
            else:
                self._ranks[said["pid"]] = Rank(said["pid"])
                self._begun.put(self._ranks[said["pid"]])
        self._begun.put(None)

    def close(self) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        self._helper.wait(PATIENCE)


class Launcher:
    """Listen for rank processes, start them, and move them between worlds. Messages are kept by slot."""

    def __init__(self, folder: Path, forks: Forks, *, sockets: Path) -> None:
        self._forks = forks
        self._logs = folder
        self.path = sockets / "agent.sock"
        self.said: dict[int, list[dict[str, Any]]] = {}
        self.trained: dict[int, dict[str, int]] = {}
        """The highest attempt that a slot had ranks in before."""
        self.tiers: dict[int, dict[str, dict[str, Any]]] = {}
        """By slot, the memory tier of its launcher."""
        self._changed = threading.Condition()
        self._writers: dict[int, socket.socket] = {}
        self._listeners: dict[int, threading.Thread] = {}
        """By process."""
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.path))
        self._server.listen()
        self._stores: list[TCPStore] = []
        self._root = folder
        self.script = SCRIPT
        self.interval = "1000000"  # no test makes that many steps
        self._arguments: tuple[str, ...] = ()
        self.processes: dict[int, Rank] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                self._listeners[pid] = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._listeners[pid].start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve a connection to its end. The last line of a killed process may be incomplete."""
        with contextlib.suppress(OSError, ValueError), connection, connection.makefile("r") as lines:
            first = json.loads(lines.readline())
            slot = first["slot"]
            with self._changed:
                self._writers[slot] = connection
            self._heard(slot, first)
            for line in lines:
                self._heard(slot, json.loads(line))

    def _hear_out(self, pid: int) -> None:
        """Receive all messages of an ended process. Connections are accepted in order, so a later one proves its
        acceptance."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as later:
            later.settimeout(PATIENCE)
            later.connect(str(self.path))
            later.shutdown(socket.SHUT_WR)
            assert not later.recv(1)
        listener = self._listeners.get(pid)
        if listener is not None:
            listener.join(PATIENCE)
            assert not listener.is_alive(), f"process {pid} has ended, and its connection has not"

    def _heard(self, slot: int, message: dict[str, Any]) -> None:
        if message["type"] == "hello":
            attempt_id = {name: message[name] for name in ("generation", "attempt")}
            known = {"trained": self.trained.get(slot), "tiers": self.tiers.get(slot, {})}
            self.tell(slot, type="welcome", claims=[], settings={}, **known, **attempt_id)
        with self._changed:
            self.said.setdefault(slot, []).append(message)
            self._changed.notify_all()

    def tell(self, slot: int, **message: Any) -> None:
        self._writers[slot].sendall(json.dumps(message).encode() + b"\n")

    def ask(self, slot: int, kind: str, request: str, **more: Any) -> None:
        self.tell(slot, type=kind, id=request, reason="a test", **more)

    def of(self, slot: int, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.said.get(slot, []) if message["type"] == kind]

    def wait(self, what: str, until: Callable[[], bool], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not until():
                if not self._changed.wait(min(1.0, deadline - time.monotonic())) and time.monotonic() > deadline:
                    raise AssertionError(f"waited in vain for {what}; said: {self.said}; {self.output()}")

    def output(self) -> list[str]:
        logs = [self._log(slot) for slot in sorted(self.processes)]
        return [log.read_text() if log.exists() else "" for log in logs]

    def _log(self, slot: int) -> Path:
        return self._logs / f"rank-{slot}.log"

    def go(self, step: int) -> None:
        """Release ranks that the script holds at this step, and those that reach it later."""
        self.path.with_name(f"go-{step}").touch()

    def start(self, world_size: int, root: Path, *arguments: str, attempt: int = 1) -> list[Rank]:
        """Start a first world in which slot n has rank n."""
        self.said.clear()
        self.processes.clear()
        self._root, self._arguments = root, arguments
        return self.form(attempt, list(range(world_size)))

    def leave(self, attempt: int, *slots: int) -> None:
        """End an attempt."""
        for slot in slots:
            self.tell(slot, type="leave", generation=1, attempt=attempt, reason="a test")

    def has_left(self, slot: int, attempt: int) -> bool:
        return any(message["attempt"] == attempt for message in self.of(slot, "left"))

    def end_attempt(self, attempt: int, *slots: int) -> None:
        """End the attempt for these slots when the first of them leaves, as a launcher does.

        gloo does not report a loss to every survivor: one of two may wait for the other, which detected it and has
        left.
        """
        self.wait("one to leave", lambda: any(self.has_left(slot, attempt) for slot in slots))
        self.leave(attempt, *(slot for slot in slots if not self.has_left(slot, attempt)))
        self.wait("all to leave", lambda: all(self.has_left(slot, attempt) for slot in slots))

    def lose(self, slot: int) -> None:
        """Kill a rank. Its slot is free afterwards."""
        process = self.processes.pop(slot)
        process.kill()
        process.wait()

    def form(self, attempt: int, slots: list[int], *, generation: int = 1, standby: bool = False) -> list[Rank]:
        """Form the next world of these slots in order of rank. Slots without a process get one."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        meeting = Meeting(generation, attempt, len(slots), store.port)
        for rank, slot in enumerate(slots):
            if slot in self.processes:
                self._move(slot, rank, meeting)
            else:
                self.processes[slot] = self._spawn(slot, self._environ(slot, rank, meeting))
        return [self.processes[slot] for slot in slots]

    def stand_by(self, slot: int) -> None:
        """Start a process that gets its world later."""
        environ = self._common(slot) | {"HOLDFAST_STANDBY": "1"}
        self.processes[slot] = self._spawn(slot, environ)

    def _spawn(self, slot: int, environ: dict[str, str]) -> Rank:
        rank = self._forks.start(self.script, self._arguments, environ, self._log(slot))
        rank.hear_out = self._hear_out
        return rank

    def _move(self, slot: int, rank: int, meeting: Meeting) -> None:
        self.tell(
            slot,
            type="world",
            generation=meeting.generation,
            attempt=meeting.attempt,
            publication=f"p{meeting.generation}",
            rank=rank,
            localRank=rank,
            worldSize=meeting.size,
            localWorldSize=meeting.size,
            groupRank=0,
            groupWorldSize=1,
            masterHost="127.0.0.1",
            masterPort=meeting.port,
            jobUID="job-1",
            runID="run-1",
            torchrun={"RANK": str(rank), "WORLD_SIZE": str(meeting.size)},
        )

    def _common(self, slot: int) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_AGENT_SOCKET": str(self.path),
            "HOLDFAST_SLOT": str(slot),
            "HOLDFAST_CHECKPOINT_DIR": str(self._root),
            "HOLDFAST_CHECKPOINT_INTERVAL": self.interval,
        }

    def _environ(self, slot: int, rank: int, meeting: Meeting) -> dict[str, str]:
        return self._common(slot) | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(meeting.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(meeting.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "HOLDFAST_GENERATION": str(meeting.generation),
            "HOLDFAST_ATTEMPT": str(meeting.attempt),
            "HOLDFAST_PUBLICATION": f"p{meeting.generation}",
            "HOLDFAST_JOB_UID": "job-1",
        }

    def finish(self) -> list[int]:
        """Wait until all ranks have ended. Return their exit codes by slot."""
        return [self.processes[slot].wait() for slot in sorted(self.processes)]

    def told(self, slot: int) -> dict[str, Any]:
        """Return what the script of a slot printed at its end."""
        for line in reversed(self._log(slot).read_text().splitlines()):
            if line.startswith('{"losses"'):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"slot {slot} did not come to its end: {self._log(slot).read_text()}")

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._server.shutdown(socket.SHUT_RDWR)  # else the thread that accepts stays in the kernel
        self._server.close()
