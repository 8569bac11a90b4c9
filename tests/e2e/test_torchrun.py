"""An unmodified torchrun with a script that knows nothing of Holdfast: lost workers are replaced, also its host."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.install import job_with_script
from holdfast_testbed.drill.watcher import Watcher

pytestmark = pytest.mark.e2e
SCRIPT = Path(__file__).parent / "scripts" / "plain_ddp.py"
JOB = "plain"


class Step(NamedTuple):
    """As the script noted it."""

    run: str
    number: int
    world: int


@pytest.fixture
def watcher(cluster: Cluster, namespace: str) -> Iterator[Watcher]:
    """The job, applied."""
    job = job_with_script(cluster, namespace, JOB, SCRIPT)
    job["spec"]["rendezvous"] = {"backend": "C10d"}
    job["spec"]["checkpoint"] = {"volume": job["spec"]["checkpoint"]["volume"]}
    for field in ("hangDetection", "preflight"):
        job["spec"].pop(field, None)
    trainer = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    trainer["command"] = ["python", "-m", "torch.distributed.run", *trainer["command"][4:]]
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(job))
    with Watcher(cluster, namespace, JOB) as watcher:
        yield watcher


@pytest.mark.thorough
def test_workers_and_host_are_replaced_and_the_job_completes(
    cluster: Cluster, namespace: str, watcher: Watcher
) -> None:
    folder = cluster.checkpoint_dir(namespace) / namespace / JOB
    first = trains_on(watcher, folder, after=Step("", 0, 0))
    assert watcher.view.incidents_by_cause == {}

    cluster.kubectl("-n", namespace, "delete", "pod", f"{JOB}-w2", "--wait=false")
    watcher.wait("the loss to be counted", lambda: watcher.view.incidents_by_cause == {"Interruption": 1}, 60)
    second = trains_on(watcher, folder, after=last(folder))
    assert second.run == first.run, "the host is the same"

    cluster.kubectl("-n", namespace, "delete", "pod", f"{JOB}-w0", "--wait=false")
    watcher.wait("the loss to be counted", lambda: watcher.view.incidents_by_cause == {"Interruption": 2}, 60)
    watcher.wait("another host", lambda: last(folder).run != first.run, timeout=180)
    trains_on(watcher, folder, after=last(folder))

    (folder / "done").touch()
    watcher.wait("the end", lambda: watcher.view.is_true("Complete"), timeout=120)
    assert watcher.view.incidents_by_cause == {"Interruption": 2}
    numbers = [step.number for step in steps(folder)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(numbers)), "none is left out"


def trains_on(watcher: Watcher, folder: Path, *, after: Step) -> Step:
    """Wait until all three have made some steps more; the last of them."""
    watcher.wait(
        "three workers that train",
        lambda: last(folder).world == 3 and last(folder).number >= after.number + 5,
        timeout=180,
    )
    return last(folder)


def last(folder: Path) -> Step:
    return next(reversed(steps(folder)), Step("", 0, 0))


def steps(folder: Path) -> list[Step]:
    notes = folder / "steps"
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [Step(run, int(number), int(world)) for run, number, world in (line.split() for line in lines)]
