"""The operator of this tree as a separate process on loopback."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.errors import NotReadyError
from holdfast_testbed.node.processes import die_with_parent
from holdfast_testbed.ports import free_port
from holdfast_testbed.settings import settings

MODULE: Final = ("-m", "holdfast_operator")
_END_SECONDS: Final = 120.0


class OperatorProcess:
    """`python -m holdfast_operator`, or another program that runs it. All its starts share one log."""

    def __init__(
        self, kubeconfig: Path, folder: Path, program: Sequence[str] = MODULE, *, name: str = "", **environment: str
    ) -> None:
        self.agents_port, self.http_port = free_port(), free_port()
        self.name = name or f"operator-{self.http_port}"
        self.program = program
        self._log = folder / f"{self.name}.log"
        self._log.unlink(missing_ok=True)
        # Only these variables: a setting of this process would become one of the operator.
        self.environment = {
            "PATH": os.defpath,
            "PYTHONPATH": str(settings().repository / "operator" / "src"),
            "KUBECONFIG": str(kubeconfig),
            "HOLDFAST_NAMESPACE": OPERATOR_NAMESPACE,
            "HOLDFAST_POD_NAME": self.name,
            "HOLDFAST_POD_IP": "127.0.0.1",
            "HOLDFAST_HOST": "127.0.0.1",
            "HOLDFAST_AGENTS_PORT": str(self.agents_port),
            "HOLDFAST_HTTP_PORT": str(self.http_port),
            "HOLDFAST_AGENTS_URL": f"https://127.0.0.1:{self.agents_port}",
            "HOLDFAST_SIDECAR_IMAGE": "docker.io/holdfast/sidecar:test",
            **environment,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and return at once. It is killed when the calling thread ends."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.program],
                env=self.environment,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one call into libc
            )

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: int) -> None:
        self._started.send_signal(number)

    def wait(self) -> int:
        """Wait for the end, and return the exit status."""
        return self._started.wait(_END_SECONDS)

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise NotReadyError(f"{self.name} was never started")
        return self._process

    def alive(self) -> bool:
        """Return whether the started process still runs."""
        return self._process is not None and self._process.poll() is None

    def ready(self) -> bool:
        """Return whether the readiness probe succeeds."""
        return self.answers("/readyz")

    def answers(self, path: str) -> bool:
        """Return whether a page answers with 200."""
        return self.page(path, seconds=5) is not None

    def page(self, path: str, seconds: float = 60) -> str | None:
        """Return a page; None unless it answers with 200."""
        try:
            status, text = self.get(path, seconds)
        except (OSError, http.client.HTTPException):
            return None
        return text if status == 200 else None

    def get(self, path: str, seconds: float = 60) -> tuple[int, str]:
        """Return status and text of a page of probes and metrics."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=seconds)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def log(self) -> str:
        """Return all log lines; the last one may be incomplete."""
        whole, _, _rest = self._log.read_bytes().rpartition(b"\n")
        return whole.decode()
