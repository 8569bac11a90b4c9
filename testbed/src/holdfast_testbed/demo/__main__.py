"""Run with `make demo`. Exit status 0 only if every promise of the table was kept."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from holdfast_testbed.build.programs import program
from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.demo.story import Narrator, Teller
from holdfast_testbed.demo.table import Check, render
from holdfast_testbed.drill.faults import DRILL_INTERVAL_STEPS, DRILLS, Drill, DrillJob
from holdfast_testbed.drill.install import example_job, install_chart
from holdfast_testbed.drill.promises import Verdict, judge
from holdfast_testbed.drill.watcher import Watcher
from holdfast_testbed.errors import TestbedError
from holdfast_testbed.settings import settings

CLUSTER = "demo"
NAMESPACE = "demo"
JOB = "gpt"
WORKERS = 3
REFERENCE = Path(__file__).with_name("undisturbed.json")
HELD_OUT = re.compile(r"held-out bits per byte: (?P<loss>[0-9.]+) at step (?P<step>\d+), text (?P<text>\w+)")
OTHER_TEXT_MARGIN = 1.05
"""Another version of Python has another standard library to train on, so the loss is similar but not equal."""
AUDIT = re.compile(r"audit: (?P<words>.*)")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the demo and return the exit status. The cluster is always removed, except with KEEP=1."""
    for number in _ENDING:  # even if a shell started this process with SIGINT ignored
        signal.signal(number, _interrupt)
    teller, verdicts = Teller(), list[Verdict]()
    try:
        checks = _play(teller, verdicts)
    except KeyboardInterrupt:
        return 130
    except (TestbedError, TimeoutError) as error:
        print("\n" + render(verdicts, []))
        sys.stderr.write(f"error: the demo stopped early: {error}\n")
        return 1
    print("\n" + render(verdicts, checks))
    kept = all(v.held for v in verdicts) and all(check.held for check in checks)
    print("\nEvery promise was kept." if kept else "\nA promise was MISSED: see above.")
    return 0 if kept else 1


def _play(teller: Teller, verdicts: list[Verdict]) -> list[Check]:
    """Run all faults, and append the verdict on each. Return the checks of the whole run."""
    with _cluster(teller) as cluster:
        install_chart(cluster)
        cluster.prepare_namespace(NAMESPACE)
        teller.restart_clock()
        cluster.kubectl("-n", NAMESPACE, "apply", "-f", "-", input=example_job())
        teller.say("you", "kubectl apply -f trainer_lib/examples/gpt/job.yaml")
        with Watcher(cluster, NAMESPACE, JOB) as watcher, Narrator(watcher, teller):
            job = DrillJob(cluster=cluster, watcher=watcher, say=teller.fault)
            verdicts.extend(_keep_promises(job, teller))
            teller.say("demo", "no more faults: waiting for the job to complete")
            watcher.wait("the job's end", lambda: _ended(watcher), timeout=300)
            return _final_checks(cluster, watcher, verdicts)


@contextmanager
def _cluster(teller: Teller) -> Iterator[Cluster]:
    """Start a cluster for this run, and remove it afterwards unless KEEP=1. An interrupted start also removes it."""
    teller.say("demo", f"bringing up Kubernetes with {WORKERS} nodes")
    cluster = None
    try:
        cluster = Cluster.up(name=CLUSTER, nodes=WORKERS, replace=True)
        teller.say("demo", "cluster is ready; look around from another terminal with")
        teller.say("demo", f"  export KUBECONFIG={cluster.kubeconfig} PATH=$PATH:{program('kubectl').parent}")
        teller.say("demo", f"  kubectl -n {NAMESPACE} get ftj,pods -w    kubectl -n {NAMESPACE} describe ftj {JOB}")
        yield cluster
    except KeyboardInterrupt:
        teller.say("demo", "interrupted: the cluster is removed" if cluster is None else "interrupted")
        raise
    finally:
        if cluster is not None and settings().keep:
            teller.say("demo", f"left running (KEEP=1); remove with: make cluster-down CLUSTER={CLUSTER}")
        elif cluster is not None:
            _stop_listening()
            teller.say("demo", "removing the cluster")
            cluster.down()


def _interrupt(number: int, frame: FrameType | None) -> None:
    _stop_listening()
    raise KeyboardInterrupt


def _stop_listening() -> None:
    """Ignore further signals, so that a second Ctrl-C does not interrupt the clean-up."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


def _keep_promises(job: DrillJob, teller: Teller) -> Iterator[Verdict]:
    job.watcher.wait_for_world(WORKERS, steps=1, timeout=120)
    teller.say("demo", "the job is training; faults are injected from now on")
    for drill in DRILLS:
        yield _one(drill, job, teller)


def _one(drill: Drill, job: DrillJob, teller: Teller) -> Verdict:
    job.watcher.wait_for_world(WORKERS, steps=DRILL_INTERVAL_STEPS // 5, timeout=120)
    verdict = judge(drill.promise, drill.run(job))
    outcome = verdict.outcome
    word = "kept" if verdict.held else "MISSED"
    text = f"{word}: next step after {outcome.resumed_seconds:.1f} s, {outcome.lost_steps} steps lost"
    teller.say("promise", text)
    return verdict


def _ended(watcher: Watcher) -> bool:
    return watcher.view.is_true("Complete") or watcher.view.is_true("Failed")


def _final_checks(cluster: Cluster, watcher: Watcher, verdicts: list[Verdict]) -> list[Check]:
    view = watcher.view
    logs = "\n".join(_log(cluster, pod.name) for pod in watcher.pods)
    expected = len(verdicts)
    counted = sum(view.incidents_by_cause.values())
    return [
        Check(what="the job is Complete", measured=view.phase, held=view.is_true("Complete")),
        _audit_check(logs),
        Check(
            what="no incident counted twice",
            measured=f"{expected} faults, {counted} counted ({dict(view.incidents_by_cause)})",
            held=counted == expected and len({i.attempt_id for i in view.incidents}) == len(view.incidents),
        ),
        _loss_check(logs),
    ]


def _log(cluster: Cluster, pod: str) -> str:
    return cluster.kubectl("-n", NAMESPACE, "logs", pod, "-c", "trainer", "--tail=400", check=False)


def _audit_check(logs: str) -> Check:
    found = AUDIT.search(logs)
    words = found["words"] if found else "the job printed no audit"
    return Check(what="every sample exactly once", measured=words, held=words.startswith("exactly once"))


def _loss_check(logs: str) -> Check:
    reference = json.loads(REFERENCE.read_text())
    what = "held-out loss within the spread of undisturbed runs"
    found = HELD_OUT.search(logs)
    if found is None:
        return Check(what=what, measured="the job printed none", held=False)
    loss, step = float(found["loss"]), int(found["step"])
    limit = float(reference["threshold"])
    known = found["text"] == reference["text"]
    if not known:
        limit *= OTHER_TEXT_MARGIN
    measured = f"{loss:.4f} bits per byte at step {step}, at most {limit:.4f}"
    if not known:
        measured += f" (the library of this Python is not the reference text: margin {OTHER_TEXT_MARGIN})"
    return Check(what=what, measured=measured, held=loss <= limit and step == reference["steps"])


if __name__ == "__main__":
    started = time.monotonic()
    status = main()
    print(f"the demo took {time.monotonic() - started:.0f} s")
    sys.exit(status)
