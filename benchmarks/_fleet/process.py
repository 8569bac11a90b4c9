"""The operator under test as a process of its own, under the chart's rights, and what it costs."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from holdfast_testbed.cluster import Cluster
from holdfast_testbed.commands import run
from holdfast_testbed.programs import program

SYSTEM = "holdfast-system"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:holdfast"
ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
READY_SECONDS = 300.0


def rights(cluster: Cluster) -> Path:
    """A kubeconfig of the chart's own service account, with exactly the chart's rights."""
    flags = ("-n", SYSTEM, "--kube-version", "1.36.0")
    rendered = run([program("helm"), "template", "holdfast", ROOT / "charts" / "holdfast", *flags])
    kinds = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    granted = [document for document in yaml.safe_load_all(rendered) if document and document["kind"] in kinds]
    cluster.kubectl("create", "namespace", SYSTEM)
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(granted))
    return cluster.kubeconfig_for(service_account="holdfast", namespace=SYSTEM)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a process took over a time."""

    cores: float
    rss_mib: float


class Operator:
    """``python -m holdfast_operator``. With a profile, samples of all its threads go to that file when it ends."""

    def __init__(self, kubeconfig: Path, log: Path, profile: Path | None = None) -> None:
        self.agents_port, self._http_port = free_port(), free_port()
        self._log, self._profile, self._starts = log, profile, 0
        log.unlink(missing_ok=True)
        self._environment = {
            "PATH": os.defpath,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "KUBECONFIG": str(kubeconfig),
            "HOLDFAST_NAMESPACE": SYSTEM,
            "HOLDFAST_HOST": "127.0.0.1",
            "HOLDFAST_AGENTS_PORT": str(self.agents_port),
            "HOLDFAST_HTTP_PORT": str(self._http_port),
            "HOLDFAST_AGENTS_URL": f"https://127.0.0.1:{self.agents_port}",
            "HOLDFAST_SIDECAR_IMAGE": "docker.io/holdfast/sidecar:bench",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once."""
        self._starts += 1
        module = ["holdfast_operator"]
        environment = self._environment
        if self._profile is not None:
            module = ["_fleet.profiled", f"{self._profile}.{self._starts}"]
            environment = {**environment, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{environment['PYTHONPATH']}"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *module],
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call, no locks
            )

    def end(self) -> None:
        """SIGKILL; with a profile SIGTERM, so that it is written."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL if self._profile is None else signal.SIGTERM)
            self._process.wait(60)

    def check(self) -> None:
        """Raises when it has ended by itself."""
        if self._process is None or self._process.poll() is not None:
            raise SystemExit(f"the operator ended: {self._log.read_text()[-3000:]}")

    def until(self, condition: Callable[[], bool], what: str, every: float = 0.5) -> None:
        """Wait for something that it brings about."""
        end = time.monotonic() + READY_SECONDS
        while not condition():
            self.check()
            if time.monotonic() > end:
                raise SystemExit(f"not within {READY_SECONDS:.0f} s: {what}; see {self._log}")
            time.sleep(every)

    def converged(self, jobs: int) -> bool:
        """Whether it has gone over so many jobs at least once."""
        if self._get("/readyz") is None:
            return False
        lines = (self._get("/metrics") or "").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("holdfast_jobs{")) >= jobs

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}{path}", timeout=30) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    def cpu_seconds(self) -> float:
        """CPU time since it started."""
        fields = self._proc("stat").rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self, field: str = "VmRSS") -> float:
        """MiB: ``VmRSS`` now, ``VmHWM`` at most."""
        line = next(line for line in self._proc("status").splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) / 1024

    def cost(self, seconds: float) -> Cost:
        """What it takes from now on for so long."""
        before, began = self.cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return Cost(
            cores=(self.cpu_seconds() - before) / (time.monotonic() - began),
            rss_mib=self.memory(),
        )

    def _proc(self, name: str) -> str:
        if self._process is None:
            raise SystemExit("the operator was never started")
        return Path(f"/proc/{self._process.pid}/{name}").read_text()
