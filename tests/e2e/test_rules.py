"""`spec.recovery` on real nodes, as docs/how-to/restart-policy.md says it: a job whose rules are edited in flight."""

from __future__ import annotations

import signal
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast_testbed.drill import script_log
from holdfast_testbed.drill.faults import DRILL_INTERVAL_STEPS, DrillJob, await_save, leader
from holdfast_testbed.drill.install import DRILL_JOB, apply_drill_job
from holdfast_testbed.drill.job_view import Incident
from holdfast_testbed.drill.matrix import signal_rank, told
from holdfast_testbed.drill.spec_edits import edit
from holdfast_testbed.drill.trial import LATE_COUNT_SECONDS, WORKERS, Cost, cost_so_far, newly_counted
from holdfast_testbed.drill.watcher import PodView, Watcher

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

NAMESPACE = "rules"
OPERATOR_METRICS_PORT = 8080
PAUSE_SECONDS = 4
"""Before what failed by itself starts again: as long as that the job is seen to be Restarting."""

Fault = Callable[[DrillJob], None]
Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rule, and a fault that it is about."""

    rule: Json
    fault: Fault
    matches: str
    counted: Mapping[str, int]


def on_exit(code: int) -> Json:
    return {"onExitCodes": {"operator": "In", "values": [code]}}


OTHER_RULE = {"name": "elsewhere", "action": "FailJob", **on_exit(99)}
"""One that stands before the others, and matches nothing here."""

ROWS = {
    "flaky-data": Row(
        rule={"action": "Ignore", **on_exit(42)},
        fault=told("exit", code=42),
        matches="exit code 42; not counted towards any budget",
        counted={},
    ),
    "broken-memory": Row(
        rule={"action": "InPlace", "cause": "OOM", "onSignals": ["SIGSEGV", "SIGBUS"]},
        fault=signal_rank(signal.SIGSEGV),
        matches="signal SIGSEGV",
        counted={"OOM": 1},
    ),
    "leak": Row(
        rule={"action": "RecreatePod", "onOOM": "Process"},
        fault=told("fill memory"),
        matches="out of memory (process)",
        counted={"OOM": 1},
    ),
    "stuck": Row(
        rule={"action": "ReplaceNode", "cause": "Application", "onHang": True},
        fault=told("hang"),
        matches="a hang",
        counted={"Application": 1},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Ruled:
    """The job, in the hands of one test."""

    stage: DrillJob
    known: Mapping[str, int]
    """What had been counted before, by cause."""
    before: list[PodView]
    """Its workers."""

    @property
    def watcher(self) -> Watcher:
        return self.stage.watcher

    @property
    def counted(self) -> dict[str, int]:
        return newly_counted(self.known, self.watcher.view.incidents_by_cause)

    def has(self, rules: Sequence[Json], escalation: Json | None = None) -> None:
        edit(self.stage, {"recovery": {"rules": rules, "escalation": escalation}})

    def suffers(self, fault: Fault) -> Incident:
        """Resource, event and metric tell in the same words what is done about it."""
        known, decided = self.newest, decisions(self.stage)
        fault(self.stage)
        self.watcher.wait("an incident", lambda: self.newest > known, timeout=120)
        view = self.watcher.view
        incident = view.incidents[-1]
        shown = [message for status, _, message in view.conditions.values() if status == "True"]
        assert any(incident.why in message for message in shown)
        self.watcher.wait("the event", lambda: incident.why in events(self.stage, incident.decision), timeout=30)
        told = (incident.cause, incident.why.split(":")[0], incident.decision)
        once = decided.get(told, 0) + 1
        self.watcher.wait("the metric", lambda: decisions(self.stage).get(told) == once, timeout=30)
        return incident

    @property
    def newest(self) -> int:
        """The number of the last incident."""
        return max((incident.number for incident in self.watcher.view.incidents), default=0)

    def trains_without(self, pods: list[PodView]) -> None:
        """These are replaced, and no other is."""
        gone = {pod.name for pod in pods}
        stay = {pod.name for pod in self.before} - gone
        self.watcher.wait("others in their places", lambda: self._is_whole_without(gone), timeout=240)
        self.watcher.wait_for_world(WORKERS, steps=5, timeout=240)
        time.sleep(LATE_COUNT_SECONDS)  # for one that leaves too late to be seen above
        assert stay <= set(self.watcher.view.members)

    def _is_whole_without(self, gone: set[str]) -> bool:
        members = self.watcher.view.members
        return len(members) == WORKERS and gone.isdisjoint(members)


@pytest.fixture
def job(stage: DrillJob) -> Ruled:
    """Three train. One that has failed is there anew, and goes on from its checkpoints."""
    watcher = stage.watcher
    if watcher.view.is_true("Failed"):
        stage.cluster.kubectl("-n", NAMESPACE, "delete", "ftj", DRILL_JOB, "--cascade=foreground")
        apply_drill_job(stage.cluster, NAMESPACE)
    watcher.wait_for_world(WORKERS, steps=5, timeout=300)
    pause = {"initialSeconds": PAUSE_SECONDS, "maxSeconds": PAUSE_SECONDS, "jitterPercent": 0}
    edit(stage, {"recovery": {"backoff": pause}})
    script_log.clear(stage.checkpoints)
    return Ruled(stage=stage, known=dict(watcher.view.incidents_by_cause), before=stage.workers())


@pytest.mark.parametrize("name", ROWS)
def test_a_failure_that_a_rule_is_about_is_answered_as_it_says(job: Ruled, name: str) -> None:
    row = ROWS[name]
    job.has([OTHER_RULE, {"name": name, **row.rule}])

    incident = job.suffers(row.fault)

    action = row.rule["action"]
    assert (incident.decision, incident.why) == (f"{action}ByRule", f"{action}: rule {name} matches {row.matches}")
    (hurt,) = (pod for pod in job.before if pod.name == incident.pod)
    match action:
        case "RecreatePod":
            job.trains_without([hurt])
        case "ReplaceNode":
            job.trains_without([pod for pod in job.before if pod.node == hurt.node])
            assert hurt.node not in {pod.node for pod in job.stage.workers()}
        case _:
            job.trains_without([])
    assert job.counted == row.counted
    assert cost_so_far(job.stage) == Cost()


def test_what_keeps_failing_in_place_is_answered_with_more(job: Ruled) -> None:
    job.has([], escalation={"actions": ["InPlace", "RestartGang"], "failures": 1})

    first = job.suffers(told("exit", code=3))
    job.trains_without([])
    await_save(job.stage)
    second = job.suffers(told("exit", code=3))
    job.trains_without(job.before)

    assert (first.decision, second.decision) == ("InPlaceByDefault", "RestartGangEscalated")
    assert second.why == f"RestartGang: InPlace was tried 1 time for {first.pod} within 3600 s"
    assert job.counted == {"Application": 2}
    # All leave in the pause, so no world is there that could agree on a commit: the newest one goes on.
    cost = cost_so_far(job.stage)
    assert cost == Cost(lost=cost.lost)
    assert cost.lost <= DRILL_INTERVAL_STEPS


def test_a_failure_that_no_other_try_would_mend_ends_the_job(job: Ruled) -> None:
    job.has([{"name": "bad-arguments", "action": "FailJob", **on_exit(5)}])

    incident = job.suffers(told("exit", code=5))

    job.watcher.wait("the job's end", lambda: job.watcher.view.is_true("Failed"), timeout=60)
    _, reason, message = job.watcher.view.conditions["Failed"]
    assert (reason, incident.why) == ("FailJobByRule", "FailJob: rule bad-arguments matches exit code 5")
    assert message.startswith(incident.why)
    assert job.counted == {"Application": 1}
    assert script_log.worlds(script_log.read(job.stage.checkpoints)) == 1
    assert cost_so_far(job.stage) == Cost()


def events(stage: DrillJob, reason: str) -> str:
    """All messages under it."""
    words = ("get", "events", "--field-selector", f"reason={reason}", "-o", "jsonpath={.items[*].message}")
    return stage.cluster.kubectl("-n", stage.watcher.namespace, *words)


def decisions(stage: DrillJob) -> dict[tuple[str, str, str], float]:
    """How often the operator that leads has decided what, by (cause, action, reason)."""
    address = leader(stage.cluster)["status"]["podIP"]
    with urllib.request.urlopen(f"http://{address}:{OPERATOR_METRICS_PORT}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = (sample for family in families for sample in family.samples)
    return {
        (sample.labels["cause"], sample.labels["action"], sample.labels["reason"]): sample.value
        for sample in samples
        if sample.name == "holdfast_recovery_decisions_total"
    }
