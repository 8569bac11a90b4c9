"""The operator of this tree as a process of its own, on loopback."""

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
    """`python -m holdfast_operator`, or another program around it. One log for all its starts."""

    def __init__(
        self, kubeconfig: Path, folder: Path, program: Sequence[str] = MODULE, *, name: str = "", **environment: str
    ) -> None:
        self.agents_port, self.http_port = free_port(), free_port()
        self.name = name or f"operator-{self.http_port}"
        self.program = program
        self._log = folder / f"{self.name}.log"
        self._log.unlink(missing_ok=True)
        # Nothing of ours but what is named here: a setting of this process would be one of the operator.
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
        """Start it; returns at once. It is killed when the thread that did this ends."""
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
        """SIGTERM; returns its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: int) -> None:
        self._started.send_signal(number)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
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
        """Whether the process is the one that was started."""
        return self._process is not None and self._process.poll() is None

    def ready(self) -> bool:
        """Whether its readiness probe succeeds."""
        return self.answers("/readyz")

    def answers(self, path: str) -> bool:
        """Whether a page is there and well."""
        return self.page(path, seconds=5) is not None

    def page(self, path: str, seconds: float = 60) -> str | None:
        """A page, if it is there and well."""
        try:
            status, text = self.get(path, seconds)
        except (OSError, http.client.HTTPException):
            return None
        return text if status == 200 else None

    def get(self, path: str, seconds: float = 60) -> tuple[int, str]:
        """A page of probes and metrics."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=seconds)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def log(self) -> str:
        """All lines that it wrote; the last one may be on its way."""
        whole, _, _rest = self._log.read_bytes().rpartition(b"\n")
        return whole.decode()
