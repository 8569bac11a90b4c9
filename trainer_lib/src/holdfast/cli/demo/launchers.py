"""The demo's launchers: three processes on loopback that end with the demo in any case."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.cli.support import child_process
from holdfast.core.environment import variables
from holdfast.launcher.host.run_dir import STATUS_FILE
from holdfast.launcher.process.child import own_program

COUNT = 3
PACE_FILE = "pace"
_STANDBY_READY = "a warm standby process is ready"
_PASSED_ON = ("HOLDFAST_", "TORCH", "MASTER_", "RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_")


class Launchers:
    """`holdfast run`, three times."""

    def __init__(self, root: Path, *, max_steps: int, environ: Mapping[str, str]) -> None:
        self._root = root
        self._max_steps = max_steps
        self._environ = {name: value for name, value in environ.items() if not name.startswith(_PASSED_ON)}
        self._endpoint = f"127.0.0.1:{_free_port()}"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        run_dir = self._root / f"launcher-{number}"
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir()
        own = {
            **variables(run_dir=run_dir, checkpoint_dir=self._root / "checkpoints"),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._root),  # torch leaves folders in there
        }
        options = ["--nnodes", f"2:{COUNT}", "--rdzv-endpoint", self._endpoint, "--checkpoint-interval", "100"]
        options += ["--hang-min-timeout", "1"]
        script = [sys.executable, "-m", "holdfast.cli.demo.train", str(self._root), str(self._max_steps)]
        self._processes[number] = child_process.start(
            own_program("holdfast", "run", *options, "--", *script),
            environ=self._environ | own,
            log=self._log_file(number),
        )

    def kill(self, number: int) -> None:
        """Kill a launcher and its rank, like the loss of a machine."""
        self._processes[number].kill()
        self._processes[number].wait()

    def stop(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes.values():
            process.wait()

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each; None for a running one."""
        return [process.poll() for process in self._processes.values()]

    def status(self, number: int) -> dict[str, Any]:
        """Return a launcher's status; empty before the first one."""
        try:
            document: dict[str, Any] = json.loads((self._root / f"launcher-{number}" / STATUS_FILE).read_bytes())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return document

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents that the launchers reported."""
        return [one for number in range(COUNT) for one in self.status(number).get("incidents", [])]

    def rank_of(self, number: int) -> tuple[int, int] | None:
        """Return rank and process ID of a launcher's rank process, if it has one."""
        for one in self.status(number).get("ranks", []):
            if one.get("pid"):
                return int(one["rank"]), int(one["pid"])
        return None

    def has_standby(self, number: int) -> bool:
        """Whether a launcher reports a standby process."""
        return _STANDBY_READY in self._log_file(number).read_text(errors="replace")

    def _log_file(self, number: int) -> Path:
        return self._root / f"launcher-{number}.log"

    def log(self, number: int) -> str:
        """Return the end of its log."""
        path = self._log_file(number)
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def _free_port() -> int:
    """Return a port below the range of outgoing connections, so that no other process gets it by chance."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
