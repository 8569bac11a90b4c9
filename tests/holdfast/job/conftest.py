"""Jobs in this process (a world of one), and real worlds of processes under a launcher that this test plays."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from holdfast.checkpoint.engine import Attempt, Engine, attempt_by_hand
from holdfast.config import effective
from holdfast.environment import read_environment
from holdfast.group import Group
from holdfast.job import Job
from holdfast.rank_agent import Requests
from holdfast.worlds import Claim

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


class TheEnd(Exception):  # noqa: N818  (not an error: the launcher ends the process here)
    """A quiesced rank was ended."""


@dataclass
class Recorder:
    """Plays the launcher of a job in this process: remembers what it is told, asks what a test wants asked."""

    connected: bool = True
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    wanted: Requests = field(default_factory=Requests)

    def send(self, kind: str, **body: Any) -> None:
        self.told.append((kind, body))

    def known_claims(self) -> tuple[Claim, ...]:
        return ()

    def requests(self) -> Requests:
        return self.wanted

    def answered(self, requests: Requests) -> None:
        left = tuple(item for item in self.wanted.checkpoint if item not in requests.checkpoint)
        self.wanted = Requests(checkpoint=left, quiesce=self.wanted.quiesce)

    def wait_for_the_end(self) -> NoReturn:
        raise TheEnd

    def close(self) -> None:
        return None

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [body for name, body in self.told if name == kind]


@dataclass(frozen=True)
class Solo:
    job: Job
    launcher: Recorder


@pytest.fixture
def solo() -> Callable[..., Solo]:
    """A job in a world of one; the same folder given again is the next attempt."""

    def make(root: Path | None, *, interval: str = "1000", keep_last: int = 3) -> Solo:
        launcher = Recorder()
        group = Group(rank=0, size=1, device=torch.device("cpu"), control=None)
        attempt: Attempt = attempt_by_hand(root, group)
        config = effective(
            read_environment({}), checkpoint_dir=root, checkpoint_interval=interval, keep_last=keep_last
        )
        engine = None
        if root is not None:
            engine = Engine(
                root,
                attempt,
                group,
                keep_last=keep_last,
                resume=config.resume,
                on_foreign=lambda claims: launcher.send("foreignClaims", claims=claims),
            )
        return Solo(Job(group=group, agent=launcher, attempt=attempt, config=config, engine=engine), launcher)

    return make


class Launcher:
    """Listens where rank processes speak, and starts them. Everything that each said, in its order."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "agent.sock"
        self.said: dict[int, list[dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._writers: dict[int, socket.socket] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.path))
        self._server.listen()
        self.processes: list[subprocess.Popen[bytes]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        lines = connection.makefile("r")
        hello = json.loads(lines.readline())
        rank = hello["rank"]
        connection.sendall(b'{"type":"welcome","claims":[],"settings":{}}\n')
        with self._changed:
            self._writers[rank] = connection
        self._note(rank, hello)
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                self._note(rank, json.loads(line))

    def _note(self, rank: int, message: dict[str, Any]) -> None:
        with self._changed:
            self.said.setdefault(rank, []).append(message)
            self._changed.notify_all()

    def ask(self, rank: int, kind: str, request: str) -> None:
        message = {"type": kind, "id": request, "reason": "a test"}
        self._writers[rank].sendall(json.dumps(message).encode() + b"\n")

    def of(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.said.get(rank, []) if message["type"] == kind]

    def wait(self, what: str, until: Callable[[], bool], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not until():
                if not self._changed.wait(min(1.0, deadline - time.monotonic())) and time.monotonic() > deadline:
                    raise AssertionError(f"waited in vain for {what}; said: {self.said}; {self.output()}")

    def output(self) -> list[str]:
        return [self._log(rank).read_text() for rank in range(len(self.processes))]

    def _log(self, rank: int) -> Path:
        return self.path.with_name(f"rank-{rank}.log")

    def start(self, world_size: int, root: Path, *arguments: str, attempt: int = 1) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.said.clear()
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments],
                env=self._environ(rank, world_size, port, root, attempt),
                stdout=self._log(rank).open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank in range(world_size)
        ]
        return self.processes

    def _environ(self, rank: int, world_size: int, port: int, root: Path, attempt: int) -> dict[str, str]:
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_AGENT_SOCKET": str(self.path),
            "HOLDFAST_GENERATION": "1",
            "HOLDFAST_ATTEMPT": str(attempt),
            "HOLDFAST_PUBLICATION": "p1",
            "HOLDFAST_JOB_UID": "job-1",
            "HOLDFAST_CHECKPOINT_DIR": str(root),
            "HOLDFAST_CHECKPOINT_INTERVAL": "1000",
        }

    def finish(self) -> list[int]:
        """Wait until all ranks have ended; their exit codes."""
        return [process.wait(timeout=120) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._server.close()


@pytest.fixture
def script() -> Any:
    """The script's parts, for a world of one in this process."""
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    if spec is None or spec.loader is None:
        raise AssertionError(f"{SCRIPT} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    playing = Launcher(tmp_path)
    try:
        yield playing
    finally:
        playing.close()
