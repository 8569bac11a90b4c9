"""The sidecar: memory, CPU, notice → touch file on each cloud, publication → membership file.

The real process runs with the operator's own agents' API over TLS and the testbed's exporter of eight GPUs. All
metadata services of the testbed answer at one address. No machine has all of these, so no sidecar has more work. The
memory's limit is a bare interpreter. The peer is the same interpreter with the usual libraries of such a sidecar, the
official Kubernetes client and requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _bench as bench

from holdfast_operator.agents.certificate_authority import Periods, issue, new_authority
from holdfast_operator.agents.server import AgentServer
from holdfast_operator.cluster.agent_hub import AgentHub, PodIdentity
from holdfast_testbed.fakes.dcgm import ExporterServer, FakeGpu, FakeNode
from holdfast_testbed.fakes.metadata import (
    AWS,
    AZURE,
    CLOUDS,
    GCP,
    NOTICE_SECONDS,
    AllClouds,
    Announcement,
    AzureMetadata,
    ComputeMetadata,
    Imds,
    MetadataServer,
)

GOLDEN = bench.ROOT / "tests" / "contract"
TOKEN = "a-token-of-the-benchmark"  # noqa: S105 - it opens nothing
POD = "uid-w0"
JOB = "0b9d8c1e-5b1c-4c7e-9d55-6a1f2c3d4e5f"
PATIENCE = 60.0
PEER = "from kubernetes import client, watch; import requests; client.CoreV1Api()"
PEER_NAME = "kubernetes + requests, idle"
PEER_NEEDS = ("kubernetes", "requests")
POLL_SECONDS = 2.0
NOTICES = {
    "AWS spot interruption": (AWS, "terminate"),
    "GCP preemption": (GCP, "preempted"),
    "GCP host maintenance": (GCP, "MIGRATE_ON_HOST_MAINTENANCE"),  # with GPUs, 45 min of notice
    "Azure Scheduled Event": (AZURE, "Preempt"),
}
"""The announcement of each cloud."""


def golden(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((GOLDEN / name).read_text())
    return document


@dataclass(kw_only=True)
class World:
    """The environment of a sidecar."""

    folder: Path
    hub: AgentHub
    announced: dict[str, Announcement]
    environment: dict[str, str]
    revision: int = 0

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def publish(self) -> int:
        """Publish the next revision."""
        self.revision += 1
        self.hub.publish(JOB, {**golden("membership.json"), "revision": self.revision})
        return self.revision

    def write_status(self, step: int) -> None:
        """Write a status as a training launcher does."""
        beside = self.run_dir / ".status.bench"
        beside.write_text(json.dumps({**golden("status.json"), "committedStep": step}))
        beside.rename(self.run_dir / "status.json")


@contextlib.contextmanager
def surroundings() -> Iterator[World]:
    """Start an operator's API, a metadata service and a pod's files."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "run").mkdir()
        (folder / "token").write_text(TOKEN)
        hub = AgentHub(identify, lambda _job: None)
        hub.bind(POD, JOB)
        server = AgentServer(hub, certificates(folder), host="127.0.0.1", port=0)
        server.start()
        stack.callback(server.stop)
        announced = {cloud: Announcement(instance_id="bench", cloud=cloud) for cloud in CLOUDS}
        world = World(folder=folder, hub=hub, announced=announced, environment={})
        metadata = stack.enter_context(MetadataServer(all_clouds(announced)))
        exporter = stack.enter_context(ExporterServer(FakeNode(gpus=gpus())))
        world.environment = environment(folder, server.port, metadata.url, exporter.url)
        yield world


def all_clouds(announced: dict[str, Announcement]) -> AllClouds:
    """Return the services of all clouds."""
    return AllClouds(
        Imds(announced=lambda: announced[AWS]),
        ComputeMetadata(announced=lambda: announced[GCP]),
        AzureMetadata(announced=lambda: announced[AZURE]),
    )


def gpus() -> list[FakeGpu]:
    """Return the GPUs of a usual node, all of which belong to the pod."""
    return [FakeGpu(index=n, uuid=f"GPU-{n}0000000-0000-0000-0000-000000000000", pod="gpt-w0") for n in range(8)]


def identify(token: str) -> PodIdentity | None:
    """Return the only pod, by its token."""
    return PodIdentity(namespace="ml", pod="gpt-w0", pod_uid=POD) if token == TOKEN else None


def certificates(folder: Path) -> ssl.SSLContext:
    """Return a TLS context for loopback. The benchmark's own CA is in `ca.crt`."""
    now = datetime.now(UTC)
    authority = new_authority(now, Periods())
    pair = issue(authority, ["127.0.0.1"], now, timedelta(days=1))
    (folder / "ca.crt").write_bytes(authority.certificate)
    chain = folder / "server.pem"
    chain.write_bytes(pair.key + pair.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return context


def environment(folder: Path, port: int, metadata_url: str, dcgm_url: str) -> dict[str, str]:
    """Return the sidecar's environment."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")},
        "HOLDFAST_RUN_DIR": str(folder / "run"),
        "HOLDFAST_POD_UID": POD,
        "HOLDFAST_POD_NAME": "gpt-w0",
        "HOLDFAST_POD_NAMESPACE": "ml",
        "HOLDFAST_NODE_NAME": "node-1",
        "HOLDFAST_OPERATOR_URL": f"https://127.0.0.1:{port}",
        "HOLDFAST_TOKEN_FILE": str(folder / "token"),
        "HOLDFAST_CA_FILE": str(folder / "ca.crt"),
        "HOLDFAST_NOTICE_PROVIDERS": ",".join(CLOUDS),
        "HOLDFAST_METADATA_URL": metadata_url,
        "HOLDFAST_DCGM_URL": dcgm_url,
        "HOLDFAST_SIDECAR_PORT": "0",
        "HOLDFAST_SIDECAR_ADDRESS": "127.0.0.1",
    }


@contextlib.contextmanager
def sidecar(world: World) -> Iterator[int]:
    """Start the real process with all its functions, and yield its PID."""
    with (world.folder / "sidecar.log").open("ab") as log:
        command = [sys.executable, "-m", "holdfast_sidecar"]
        process = subprocess.Popen(command, env=world.environment, stdout=log, stderr=log)
    try:
        revision = world.publish()
        world.write_status(1)
        until(lambda: stored(world) == revision, "the membership")
        until(lambda: world.hub.latest(POD) is not None, "a report")
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def idle_python(code: str) -> Iterator[int]:
    """Start an interpreter that runs the code and then waits; yield its PID."""
    command = [sys.executable, "-c", f"{code}\nprint(flush=True)\nimport sys\nsys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def until(condition: Callable[[], bool], what: str) -> float:
    """Wait for a condition. Return the time at which it held."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"never came: {what}")
        time.sleep(0.001)
    return time.monotonic()


def stored(world: World) -> int:
    """Return the revision of the stored membership."""
    try:
        return int(json.loads((world.run_dir / "membership.json").read_bytes())["revision"])
    except FileNotFoundError:
        return 0


def memory(pid: int, kind: str = "Pss") -> float:
    """Return the proportional or resident set size in MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith(f"{kind}:")) / 1024


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all its live threads; the sidecar's own threads do not end before it does."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memories(world: World, rounds: int) -> dict[str, list[float]]:
    """Return the memory of the sidecar, of the alternative with usual libraries, and of a bare interpreter."""
    resident: list[float] = []

    def ours() -> float:
        with sidecar(world) as pid:
            for _ in range(3):
                revision = world.publish()
                until(lambda revision=revision: stored(world) == revision, "the membership")  # type: ignore[misc]
            resident.append(memory(pid, "Rss"))
            return memory(pid)

    def other(code: str) -> float:
        with idle_python(code) as pid:
            return memory(pid)

    contestants = {
        "ours": ours,
        "limit": lambda: other("pass"),
    }
    if all(find_spec(name) for name in PEER_NEEDS):
        contestants["peer"] = lambda: other(PEER)
    return {**bench.interleaved(contestants, rounds), "resident": resident[1:]}


def load(world: World, pid: int, seconds: float, *, steps_a_second: float) -> float:
    """Return the load in thousandths of a core while the launcher trains at this rate."""
    stop = threading.Event()

    def train() -> None:
        step = 0
        while steps_a_second and not stop.wait(1 / steps_a_second):
            step += 1
            world.write_status(step)

    trainer = threading.Thread(target=train, daemon=True)
    before, started = cpu_seconds(pid), time.monotonic()
    trainer.start()
    stop.wait(seconds)
    used, took = cpu_seconds(pid) - before, time.monotonic() - started
    stop.set()
    trainer.join()
    return 1000 * used / took


def membership_latency(world: World) -> float:
    """Return the seconds from the operator's publication to the pod's file."""
    # At a random time, and not more often than the operator's rate limit of a pod.
    time.sleep(random.uniform(0.1, 0.3))  # noqa: S311
    started = time.monotonic()
    revision = world.publish()
    return until(lambda: stored(world) == revision, "the membership") - started


def notice_latency(world: World, cloud: str, kind: str) -> float:
    """Return the seconds from the cloud's announcement to the touch file, in a pod without earlier notices."""
    touch, log = world.run_dir / "emergency_checkpoint", world.folder / "sidecar.log"
    before = log.stat().st_size
    with sidecar(world):
        said = f"{cloud}: the source of notices answers"
        until(lambda: said in log.read_bytes()[before:].decode(), "the source")
        time.sleep(random.uniform(0.0, POLL_SECONDS))  # noqa: S311 - at any moment between two polls
        quiet, started = world.announced[cloud], time.monotonic()
        world.announced[cloud] = quiet.announce(kind, now=datetime.now(UTC), seconds=NOTICE_SECONDS[cloud])
        took = until(touch.exists, "the touch-file") - started
    world.announced[cloud] = quiet
    touch.unlink()
    (world.run_dir / "sidecar-notices.json").unlink(missing_ok=True)
    return took


def main() -> int:
    effort = bench.arguments("The sidecar's memory, CPU and latencies")
    trials = bench.Trials("sidecar", effort)
    with surroundings() as world:
        sizes = memories(world, effort.pick(quick=1, default=7, full=21))
        with sidecar(world) as pid:
            window = effort.pick(quick=1, default=20, full=60)
            repeats = effort.pick(quick=1, default=3, full=10)
            idle = trials.collect("idle", repeats, lambda: load(world, pid, window, steps_a_second=0))
            busy = trials.collect("training", repeats, lambda: load(world, pid, window, steps_a_second=5))
            wanted = effort.pick(quick=10, default=500, full=5000)
            files = trials.collect("membership", wanted, lambda: membership_latency(world))
        wanted = effort.pick(quick=1, default=30, full=1000)
        notices = {
            what: trials.collect(f"notice, {what}", wanted, lambda said=said: notice_latency(world, *said))
            for what, said in NOTICES.items()
        }
    return bench.finish("sidecar", rows(sizes, idle, busy, files, notices), effort)


def rows(
    sizes: dict[str, list[float]],
    idle: list[float],
    busy: list[float],
    files: list[float],
    notices: dict[str, list[float]],
) -> list[bench.Measurement]:
    """Return the rows of the measurements, with their bars."""
    peer = sizes.get("peer", [])
    name = PEER_NAME if peer else "kubernetes or requests is not installed"
    return [
        bench.measured(
            "sidecar-2",
            "memory with everything in use (PSS)",
            sizes["ours"],
            "MiB",
            target="<= 60",
            peer=bench.median(peer) if peer else None,
            peer_name=name,
            limit=bench.median(sizes["limit"]),
        ),
        bench.measured(
            "sidecar-2", "resident set, shared pages counted whole", sizes["resident"], "MiB", target="<= 60"
        ),
        bench.measured(
            "sidecar-2",
            "PSS over the bare interpreter",
            bench.ratios(sizes["ours"], sizes["limit"]),
            "x",
            peer=bench.median(bench.ratios(peer, sizes["limit"])) if peer else None,
            peer_name=name,
            limit=1.0,
        ),
        bench.measured("sidecar-3", "CPU, launcher silent, all clouds asked", idle, "m", target="<= 5"),
        bench.measured("sidecar-3", "CPU, five steps a second", busy, "m"),
        bench.measured("sidecar-4", "publication → membership.json, p99", files, "s", target="<= 0.5", at=0.99),
        *(
            bench.measured("sidecar-1", f"{what} → touch-file, p99 (poll 2 s)", took, "s", target="<= 2.2", at=0.99)
            for what, took in notices.items()
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
