"""Real launchers on the loopback interface, each with a run directory that a sidecar would serve."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
KEY = "ab" * 32
DEADLINE = 240.0


def eventually(condition: Callable[[], Any], what: str | Callable[[], str], *, deadline: float = DEADLINE) -> Any:
    """Wait until the condition returns a true value, and return that value."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline:.0f} s: {what() if callable(what) else what}")


def _living_in(run_dir: Path) -> list[int]:
    """Return the processes of this run directory, whichever process started them."""
    mark, found = f"HOLDFAST_RUN_DIR={run_dir}\0".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


class Pod:
    """One launcher process and its run directory."""

    def __init__(self, name: str, root: Path, shared: Path, command: Sequence[str], environ: dict[str, str]) -> None:
        self.name, self.uid = name, f"uid-{name}"
        self.run_dir = root / name
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.log = self.run_dir / "log"
        self.termination_log = self.run_dir / "termination"
        self.termination_log.touch()
        self._environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOLDFAST_RUN_DIR": str(self.run_dir),
            "HOLDFAST_POD_UID": self.uid,
            "HOLDFAST_POD_NAME": name,
            "HOLDFAST_POD_IP": "127.0.0.1",
            "HOLDFAST_NODE_NAME": f"node-{name}",
            "HOLDFAST_CONTROL_PORT": "0",
            "HOLDFAST_GRACE_SECONDS": str(DEADLINE),
            "HOLDFAST_TERMINATION_LOG": str(self.termination_log),
            "TEST_DIR": str(shared),
            **environ,
        }
        self._command = command
        self._warm = environ.get("WARM", "none")  # most tests need none, and each of them imports torch
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "holdfast", "run", f"--warm-processes={self._warm}", "--", *self._command],
                env=self._environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def restart(self) -> None:
        """Start a new process for the same pod and volume, as the kubelet does."""
        self.process.wait()
        self.process = self._start()

    @property
    def status(self) -> dict[str, Any]:
        """The status of the launcher, empty before the first one."""
        try:
            return json.loads((self.run_dir / "status.json").read_text())
        except FileNotFoundError:
            return {}

    @property
    def world(self) -> tuple[int, int] | None:
        """The attempt ID that runs here."""
        world = self.status.get("world")
        return (world["generation"], world["attempt"]) if world else None

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """The rank processes."""
        return self.status.get("ranks", [])

    @property
    def step(self) -> int:
        """The last completed step, 0 before the first."""
        return self.status.get("committedStep") or 0

    @property
    def ending(self) -> dict[str, Any]:
        """The termination log."""
        return json.loads(self.termination_log.read_text())

    def wait(self, deadline: float = DEADLINE) -> int:
        """Wait for the exit code of the launcher."""
        return self.process.wait(deadline)

    def publish(self, document: dict[str, Any]) -> None:
        """Store a membership, as the sidecar does."""
        temporary = self.run_dir / ".membership"
        temporary.write_text(json.dumps(document))
        temporary.rename(self.run_dir / "membership.json")

    def stop(self) -> None:
        """End the launcher and all that it started, so that nothing writes into the folder while it is removed."""
        self.process.kill()
        self.process.wait()
        eventually(lambda: not self._kill_all(), f"{self.name} is gone with all that it started")

    def _kill_all(self) -> list[int]:
        """Kill all processes of the run directory, and return those that were alive."""
        alive = _living_in(self.run_dir)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return alive


class Cluster:
    """Several pods, and an operator that publishes memberships."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.shared = root / "shared"
        self.shared.mkdir()
        self.pods: dict[str, Pod] = {}
        self.revision = 0
        self.settings: dict[str, Any] = {
            "minReplicas": 1,
            "replicaStep": 1,
            "onFailure": "Shrink",
            "replicas": 3,
            "processesPerWorker": 1,
            "heartbeatSeconds": 0.25,
            "deadAfterSeconds": 6.0,  # on a busy machine, launchers are delayed by seconds
            "firstAttemptWaitSeconds": DEADLINE,
            "startupDeadlineSeconds": 300.0,
            "hangDetection": {"minStepTimeoutSeconds": 10.0},  # so are ranks; tests of hangs call `find_hangs`
            "checkpoint": {"interval": "50", "keepLast": 3, "resume": "Always", "deadlineSeconds": DEADLINE},
            "budgets": [{"cause": "Application", "maxRestarts": 1, "windowSeconds": 21600.0}],
            "backoff": {"initialSeconds": 0.1, "maxSeconds": 1.0},
        }

    def script(self, name: str) -> list[str]:
        """Return the command of a rank."""
        return [sys.executable, str(SCRIPTS / name)]

    def find_hangs(self) -> None:
        """Let a rank hang after a step of one second."""
        self.settings["hangDetection"] = {"minStepTimeoutSeconds": 1.0}

    def launch(self, *names: str, script: str = "speaks.py", program: str = "", **environ: str) -> list[Pod]:
        """Start launchers."""
        command = [program] if program else self.script(script)
        for name in names:
            self.pods[name] = Pod(name, self._root, self.shared, command, environ)
        return [self.pods[name] for name in names]

    def start(self, *names: str, script: str = "speaks.py", program: str = "", **environ: str) -> list[Pod]:
        """Start launchers, and wait until each is ready."""
        pods = self.launch(*names, script=script, program=program, **environ)
        for pod in pods:
            eventually(lambda pod=pod: pod.status.get("ready"), f"{pod.name} is ready")
        return pods

    def document(self, generation: int, *names: str, **changes: Any) -> dict[str, Any]:
        """Return a membership of these pods in the order of their indexes."""
        self.revision += 1
        document: dict[str, Any] = {
            "version": 1,
            "job": {"namespace": "ml", "name": "gpt", "uid": "job-uid", "runId": "gpt-1"},
            "revision": self.revision,
            "generation": generation,
            "publication": f"p{generation}",
            "active": None,
            "previous": [],
            "gone": [],
            "members": [self._member(index, self.pods[name]) for index, name in enumerate(names)],
            "claims": [],
            "acknowledged": [],
            "restarts": {},
            "directives": {"checkpoint": None, "drain": []},
            "settings": self.settings,
            "jobKey": KEY,
        }
        return document | changes

    def publish(self, generation: int, *names: str, **changes: Any) -> dict[str, Any]:
        """Publish a membership to all pods that are alive."""
        document = self.document(generation, *names, **changes)
        for pod in self.pods.values():
            pod.publish(document)
        return document

    def await_world(self, generation: int, *names: str, above: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Wait until exactly these pods run a world of the generation above an attempt ID. Return its attempt ID."""
        uids = [self.pods[name].uid for name in names]

        def formed() -> tuple[int, int] | None:
            worlds = [self.pods[name].status.get("world") for name in names]
            attempt_ids = {(world["generation"], world["attempt"]) for world in worlds if world}
            if len(attempt_ids) != 1 or not all(world and world["members"] == uids for world in worlds):
                return None
            (attempt_id,) = attempt_ids
            return attempt_id if attempt_id[0] == generation and attempt_id > above else None

        attempt_id: tuple[int, int] = eventually(formed, lambda: f"{names} in {generation}; logs: {self.tail()}")
        return attempt_id

    def tail(self) -> str:
        """Return the ends of the logs for a message."""
        return "".join(f"\n--- {pod.name}\n{pod.log.read_text()[-1500:]}" for pod in self.pods.values())

    @staticmethod
    def _member(index: int, pod: Pod) -> dict[str, Any]:
        return {
            "index": index,
            "pod": pod.name,
            "podUID": pod.uid,
            "ip": "127.0.0.1",
            "ports": pod.status["ports"],
            "node": f"node-{pod.name}",
        }


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, like the run directory of a pod, so that a busy disk delays no launcher."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=place if os.access(place, os.W_OK) else None) as root:
        yield Path(root)


@pytest.fixture
def cluster(memory: Path) -> Iterator[Cluster]:
    """Launchers that are ended after the test."""
    made = Cluster(memory)
    yield made
    for pod in made.pods.values():
        pod.stop()


@pytest.fixture
def wait_for() -> Callable[..., Any]:
    """`eventually` as a fixture."""
    return eventually
