"""The sidecar as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clocks import DEADLINE, Document, golden, wait_until

RUN = 'import runpy; runpy.run_module("holdfast_sidecar", run_name="__main__")'


@dataclass
class SidecarProcess:
    """The real `python -m holdfast_sidecar`."""

    environment: dict[str, str]
    run_dir: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    wrapper: list[str] = field(default_factory=list)
    before: str = ""
    """Python that its interpreter runs first."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        before = len(self.lines())
        self.launch()
        line = wait_until(
            lambda: next((line for line in self.lines()[before:] if "metrics on port" in line["message"]), None),
            f"the sidecar's start: {self.log}",
        )
        self.port = int(line["message"].rpartition(" ")[2])

    def launch(self) -> None:
        """Start it without waiting until it is up."""
        program = ["-c", f"{self.before}\n{RUN}"] if self.before else ["-m", "holdfast_sidecar"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.wrapper, sys.executable, *program],
                env=self.environment,
                stderr=log,
                stdout=log,
            )
        self.started.append(self.process)

    def run(self) -> int:
        """Start it where it cannot work; its exit code."""
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "holdfast_sidecar"]
            return subprocess.run(command, env=self.environment, stderr=log, stdout=log, timeout=DEADLINE).returncode

    def lines(self) -> list[Document]:
        """The log's complete lines."""
        if not self.log.exists():
            return []
        whole = self.log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def says(self, text: str) -> int:
        """How many log lines hold the text."""
        return sum(text in line["message"] for line in self.lines())

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE)

    def terminate(self, deadline: float = DEADLINE) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline)

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Again where it is turned away: the places of earlier requests may not be free yet."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)

        def ask() -> tuple[int, str] | None:
            try:
                with urllib.request.urlopen(request, timeout=DEADLINE) as answer:  # noqa: S310 - http on loopback
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
            except (ConnectionError, urllib.error.URLError):
                return None

        return wait_until(ask, f"an answer to {method} {path}")

    def write_status(self, **changes: Any) -> Document:
        """What the launcher would do."""
        status = {**golden("status.json"), **changes}
        beside = self.run_dir / ".status.json.test"
        beside.write_text(json.dumps(status))
        beside.rename(self.run_dir / "status.json")
        return status
