"""The loss of a pod with operator and API server running, and with both stopped (bar recovery-6). The time is from
SIGKILL of a launcher to the next step of the other two, on the testbed's real nodes.

The script itself records when each step was completed; all nodes share this machine's clock. Between trials, the
third worker is replaced and has a warm process again.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import _bench as bench

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.faults import DrillJob
from holdfast_testbed.drill.install import example_job, install_chart
from holdfast_testbed.drill.trial import settle
from holdfast_testbed.drill.watcher import Watcher

NAMESPACE = "bench"
JOB = "gpt"
SCRIPT = "train.py"
FOLDER = "/var/lib/holdfast/checkpoints"
UP, DOWN = "up", "down"


@contextmanager
def stage() -> Iterator[DrillJob]:
    """Start a job of three workers that train."""
    cluster = Cluster.up(name="bench", nodes=3, replace=True)
    try:
        install_chart(cluster)
        cluster.prepare_namespace(NAMESPACE)
        folder = cluster.checkpoint_dir(NAMESPACE) / NAMESPACE / JOB
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        source = Path(__file__).with_name("_pod_loss_train.py")
        (folder / SCRIPT).write_text(source.read_text())
        job = example_job().replace("/examples/gpt/train.py", f"{FOLDER}/{SCRIPT}")
        cluster.kubectl("-n", NAMESPACE, "apply", "-f", "-", input=_without_arguments(job))
        with Watcher(cluster, NAMESPACE, JOB) as watcher:
            yield DrillJob(cluster=cluster, watcher=watcher, say=lambda text: None)
    finally:
        cluster.down()


def _without_arguments(job: str) -> str:
    """Return the job without the example's own arguments, which this script does not accept."""
    lines, inside = [], False
    for line in job.splitlines():
        if "command: [" in line and SCRIPT in line:
            lines.append(line.split(f'{SCRIPT}"')[0] + f'{SCRIPT}"]')
            inside = not line.rstrip().endswith("]")
        elif inside:
            inside = not line.rstrip().endswith("]")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def trial(where: DrillJob, condition: str) -> float:
    """Return the seconds from the kill to the first step that one of the two others completes after it."""
    settle(where)
    victim = where.workers()[-1]
    launcher, operator = where.launcher(victim), where.operator()
    if condition == DOWN:
        where.cluster.signal(operator, signal.SIGSTOP)
        where.cluster.pause("apiserver")
    try:
        time.sleep(1.0)
        killed = time.time()
        where.cluster.signal(launcher, signal.SIGKILL)
        return next_step(where, victim.name, killed) - killed
    finally:
        if condition == DOWN:
            where.cluster.resume("apiserver")
            where.cluster.signal(operator, signal.SIGCONT)


def next_step(where: DrillJob, victim: str, killed: float) -> float:
    """Return the time at which another worker completed the first step after the victim's last one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.2)
        last = max((step for step, _ in steps(where, victim, only=True)), default=0)
        after = [at for step, at in steps(where, victim, only=False) if step > last and at > killed]
        if after:
            return min(after)
    raise TimeoutError("no step within 60 s of the kill")


def steps(where: DrillJob, victim: str, *, only: bool) -> Iterator[tuple[int, float]]:
    """Yield the steps and times that the victim recorded, or the others."""
    for file in where.checkpoints.glob("steps-*"):
        if (file.name.removeprefix("steps-").rsplit(".", 1)[0] == victim) is only:
            for line in file.read_text().splitlines():
                step, _, at = line.partition(" ")
                if at:
                    yield int(step), float(at)


def main() -> int:
    effort = bench.arguments(__doc__ or "")
    rounds = effort.pick(quick=1, default=8, full=25)
    with stage() as where:
        values = bench.interleaved({name: (lambda n=name: trial(where, n)) for name in (UP, DOWN)}, rounds)
    late = bench.quantile(values[DOWN], 0.9) - bench.quantile(values[UP], 0.9)
    rows = [
        bench.measured("recovery-6", "pod lost, operator and API server up", values[UP], "s"),
        bench.measured("recovery-6", "pod lost, operator and API server stopped", values[DOWN], "s"),
        bench.measured("recovery-6", "p90 stopped − p90 up", [late], "s", target="<= 0.2"),
    ]
    return bench.finish("pod_loss", rows, effort)


if __name__ == "__main__":
    sys.exit(main())
