"""Workers that cannot start: the reason is said at once; Failed comes only with the startup deadline."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sim import Make, Sim

from holdfast_operator.api.timings import DEFAULT_TIMINGS
from holdfast_operator.decision.decide import decide
from holdfast_operator.decision.snapshot import CreationError
from holdfast_operator.views import parse_pod


def waiting(sim: Sim, reason: str, message: str) -> None:
    """All pods of the job hang on this reason."""
    for body in sim.pods.values():
        state = {"waiting": {"reason": reason, "message": message}}
        body["status"] = {"phase": "Waiting", "containerStatuses": [{"name": "trainer", "state": state}]}


def cannot_start(sim: Sim, code: int, reason: str, message: str) -> None:
    for name in sim.names():
        if sim.pods[sim.uid(name)]["status"]["phase"] not in ("Failed",):
            sim.end(name, code, reason=reason, message=message)


@pytest.mark.parametrize(
    ("kubelet", "shown"),
    [
        ("ErrImagePull", "ImagePullFailed"),
        ("ImagePullBackOff", "ImagePullFailed"),
        ("ErrImageNeverPull", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerConfigError"),
        ("CreateContainerError", "ContainerConfigError"),
    ],
)
def test_what_the_kubelet_says_becomes_a_condition(sim: Sim, kubelet: str, shown: str) -> None:
    sim.tick()
    sim.tick()
    waiting(sim, kubelet, "manifest unknown")
    sim.tick()
    assert sim.status.summary == shown
    assert "manifest unknown" in sim.status.condition("Degraded").message
    assert (shown, sim.status.condition("Degraded").message) in sim.events
    assert not sim.status.terminal


def test_refused_creation_is_a_condition_until_it_succeeds(sim: Sim) -> None:
    sim.refusal = CreationError(reason="QuotaExceeded", message="exceeded quota: pods, used 4, limited to 4")
    sim.apply(sim.plan(), actions=0)
    assert sim.status.summary == "QuotaExceeded"
    assert "limited to 4" in sim.status.condition("Degraded").message
    sim.refusal = None
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    assert not sim.status.holds("Degraded")


def test_more_than_any_node_has_is_said_without_waiting(make_sim: Make) -> None:
    sim = make_sim()
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "0"
    sim.settle()
    assert sim.status.summary == "Unschedulable"
    assert "a worker asks for 0.9 cpu" in sim.status.condition("Degraded").message


def test_selector_without_a_node_is_reported_at_once(make_sim: Make) -> None:
    """The condition ends when a node has the label."""
    sim = make_sim()
    template = sim.body["spec"]["workers"]["template"]["spec"]
    template["nodeSelector"] = {"pool": "gpu"}
    sim.settle()
    assert sim.status.summary == "Unschedulable"
    assert (
        "none of 4 nodes can run a worker: 4 without the labels of its nodeSelector (pool=gpu)"
        in sim.status.condition("Degraded").message
    )
    for node in sim.nodes.values():
        node["metadata"]["labels"]["pool"] = "gpu"
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    assert not sim.status.holds("Degraded")


def runs_something_else(sim: Sim, *, reports: bool) -> None:
    """Containers of another command: sidecars may report, and nothing speaks to them."""
    for uid, body in sim.pods.items():
        state = {"running": {"startedAt": sim.stamp()}}
        body["dead"] = True
        body["status"].setdefault("containerStatuses", [{"name": "trainer", "state": state}])
        if reports and body["status"]["phase"] == "Running":
            name, node = body["metadata"]["name"], body["spec"]["nodeName"]
            pod = {"namespace": "ml", "name": name, "uid": uid, "node": node}
            sim.heard[uid] = (sim.now, {"version": 1, "pod": pod, "launcher": None})


@pytest.mark.parametrize(
    ("reports", "mend"),
    [(True, "Its command must begin with `holdfast run`"), (False, "see the log of holdfast-sidecar")],
)
def test_trainer_without_a_launcher_is_reported(make_sim: Make, reports: bool, mend: str) -> None:
    """The condition comes within half a minute and has the remedy."""
    sim = make_sim(startupDeadlineSeconds=60)
    seconds = 0
    while sim.status.summary != "NoLauncherDetected":
        runs_something_else(sim, reports=reports)
        sim.tick()
        seconds += 1
        assert seconds < 30, sim.status.summary
    message = sim.status.condition("Degraded").message
    assert message.startswith("gpt-w0, gpt-w1, gpt-w2: trainer is running")
    assert mend in message
    for _ in range(70):
        runs_something_else(sim, reports=reports)
        sim.tick()
    assert sim.status.holds("Failed")
    assert mend in sim.status.condition("Failed").message


def test_a_launcher_that_takes_its_time_to_start_is_waited_for(make_sim: Make) -> None:
    sim = make_sim(startupDeadlineSeconds=60)
    for _ in range(25):
        runs_something_else(sim, reports=True)
        sim.tick()
    assert sim.status.summary == "NoLauncherDetected"
    for body in sim.pods.values():
        body.pop("dead")
    sim.run(30, until=lambda: len(sim.world_names()) == 3)
    assert not sim.status.holds("Degraded")
    sim.run(60)
    assert not sim.status.terminal


def test_an_operator_that_just_started_blames_no_launcher(make_sim: Make) -> None:
    sim = make_sim()
    for _ in range(12):
        runs_something_else(sim, reports=False)
        sim.tick()
    sim.restart_operator(grace=True)
    for _ in range(8):
        runs_something_else(sim, reports=False)
        sim.tick()
    assert sim.status.summary != "NoLauncherDetected"


def test_new_operator_keeps_a_condition_that_it_cannot_judge(make_sim: Make) -> None:
    sim = make_sim()
    while sim.status.summary != "NoLauncherDetected":
        runs_something_else(sim, reports=False)
        sim.tick()
    before = sim.status.condition("Degraded")
    sim.restart_operator(grace=True)
    for _ in range(4):
        runs_something_else(sim, reports=False)
        sim.tick()
        assert sim.status.condition("Degraded") == before


def test_report_to_a_new_operator_ends_the_condition(make_sim: Make) -> None:
    sim = make_sim()
    while sim.status.summary != "NoLauncherDetected":
        runs_something_else(sim, reports=False)
        sim.tick()
    sim.restart_operator(grace=True)
    for body in sim.pods.values():
        body.pop("dead")
    sim.run(30, until=lambda: len(sim.world_names()) == 3)
    assert not sim.status.holds("Degraded")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ('0/4 nodes are available: persistentvolumeclaim "x" not found', "VolumeMissing"),
        ("0/4 nodes are available: 4 node(s) had untolerated taint", "Unschedulable"),
    ],
)
def test_the_schedulers_words_become_a_condition(sim: Sim, message: str, shown: str) -> None:
    sim.unplaceable = True
    sim.settle()
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    for body in sim.pods.values():
        body["status"]["conditions"] = [condition]
    sim.tick()
    assert sim.status.summary == shown
    assert message in sim.status.condition("Degraded").message


def test_preemption_for_a_worker_is_no_startup_problem(make_sim: Make) -> None:
    """The preemption may take long."""
    sim = make_sim(startupDeadlineSeconds=60)
    sim.unplaceable = True
    sim.settle()
    message = "0/4 nodes are available: 4 No preemption victims found for incoming pod."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    for body in sim.pods.values():
        body["status"] |= {"conditions": [condition], "nominatedNodeName": "node-1"}
    sim.run(300)
    assert sim.status.summary == "Scheduling"
    assert not sim.status.holds("Degraded")


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [(128, "StartError", 'exec: "holdfast": executable file not found in $PATH'), (127, "Error", "")],
)
def test_image_without_holdfast_is_retried_slowly(make_sim: Make, code: int, reason: str, message: str) -> None:
    """The image is named, and no budget is used."""
    sim = make_sim(startupDeadlineSeconds=120)
    for _ in range(100):
        sim.tick()
        cannot_start(sim, code, reason, message)
    assert sim.status.summary == "HoldfastMissing"
    assert "must have the holdfast package" in sim.status.condition("Degraded").message
    assert sim.status.incident_count == 0
    assert 3 < len(sim.created_names) < 30
    for _ in range(40):
        sim.tick()
        cannot_start(sim, code, reason, message)
    assert sim.status.holds("Failed")
    assert "startupDeadlineSeconds" in sim.status.condition("Failed").message


def test_training_job_survives_a_replacement_that_cannot_start(make_sim: Make) -> None:
    sim = make_sim(startupDeadlineSeconds=30)
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    sim.end("gpt-w1", 137)
    sim.settle()
    state = {"waiting": {"reason": "ErrImagePull", "message": "gone"}}
    for _ in range(120):
        statuses = [{"name": "trainer", "state": state}]
        sim.pods["uid-gpt-w3"]["status"] = {"phase": "Hanging", "containerStatuses": statuses}
        sim.tick()
    assert not sim.status.terminal
    assert sim.status.summary == "ImagePullFailed"
    assert len(sim.world_names()) == 2


@pytest.mark.parametrize("unheard", ["operator restarted", "between two worlds"])
def test_job_that_trained_lately_does_not_fail_by_its_deadline(make_sim: Make, unheard: str) -> None:
    """No world is reported at the moment."""
    sim = make_sim(startupDeadlineSeconds=30)
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    sim.end("gpt-w1", 137)
    sim.settle()
    state = {"waiting": {"reason": "ErrImagePull", "message": "gone"}}
    for _ in range(60):
        statuses = [{"name": "trainer", "state": state}]
        sim.pods["uid-gpt-w3"]["status"] = {"phase": "Hanging", "containerStatuses": statuses}
        sim.tick()
    assert sim.status.trouble is not None
    if unheard == "operator restarted":
        sim.restart_operator(grace=True)
    else:
        sim.world = None
        sim.report()
    sim.settle()
    assert not sim.status.terminal
    assert len(sim.running()) == 2


def lacks_room(sim: Sim) -> None:
    """The scheduler's word on whatever has no node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
    for body in sim.pods.values():
        if not body["spec"].get("nodeName"):
            body["status"]["conditions"] = [condition]


def test_job_that_trained_waits_past_the_startup_deadline(make_sim: Make) -> None:
    """The job waits for capacity."""
    sim = make_sim(minimum=3, startupDeadlineSeconds=30)
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    sim.unplaceable = True
    sim.end("gpt-w1", 137)
    for _ in range(120):
        sim.tick()
        lacks_room(sim)
    assert sim.status.summary == "Unschedulable"
    assert not sim.status.terminal
    sim.unplaceable = False
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())


def test_job_waits_for_quota_as_for_capacity(trained: Sim) -> None:
    """Another workload used the quota meanwhile."""
    trained.body["spec"]["startupDeadlineSeconds"] = 30
    for name in trained.running():
        trained.end(name, 137)
    trained.run(10)
    trained.refusal = CreationError(reason="QuotaExceeded", message="exceeded quota: pods")
    for _ in range(120):
        trained.heard = {}  # of the pods that were refused
        trained.now += timedelta(seconds=1)
        trained.apply(trained.plan(), actions=0)
    assert trained.status.summary == "QuotaExceeded"
    assert not trained.status.terminal


def test_wait_for_capacity_does_not_use_the_startup_deadline(make_sim: Make) -> None:
    sim = make_sim(minimum=3, startupDeadlineSeconds=30)
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    sim.unplaceable = True
    sim.end("gpt-w1", 137)
    for _ in range(120):
        sim.tick()
        lacks_room(sim)
    waiting(sim, "ErrImagePull", "gone")
    sim.run(20)
    assert sim.status.summary == "ImagePullFailed"
    assert not sim.status.terminal
    sim.run(60, until=lambda: sim.status.holds("Failed"))


def unprepared(body: Any) -> None:
    """What a kubelet writes where an init container of the template failed, and ``restartPolicy`` is Never."""
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "no bucket of this name"}}
    sidecar = {"terminated": {"exitCode": 137, "reason": "Error"}}
    body["spec"]["initContainers"] = [{"name": "holdfast-sidecar", "restartPolicy": "Always"}, {"name": "fetch"}]
    body["status"] = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": "holdfast-sidecar", "state": sidecar}, {"name": "fetch", "state": ended}],
        "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }


def test_replacement_with_a_failed_init_container_is_recreated(make_sim: Make) -> None:
    """The condition names the pod."""
    sim = make_sim(startupDeadlineSeconds=30)
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    sim.end("gpt-w1", 137)
    sim.settle()
    unprepared(sim.pods["uid-gpt-w3"])
    sim.run(5)
    assert sim.status.summary == "InitContainerFailed"
    said = "Pod gpt-w3 cannot start: its init container fetch ended with exit code 1: no bucket of this name"
    assert sim.status.condition("Degraded").message == said
    sim.run(60, until=lambda: "gpt-w4" in sim.world_names())
    sim.run(5)
    assert sim.status.trouble is None
    assert sim.counted == ["Infrastructure"], "that of the worker that was killed"


def test_failing_init_containers_end_by_the_startup_deadline(make_sim: Make) -> None:
    sim = make_sim(startupDeadlineSeconds=120)
    for _ in range(200):
        for body in sim.pods.values():
            if body["spec"].get("nodeName"):
                unprepared(body)
        sim.tick()
    assert sim.status.holds("Failed")
    assert "its init container fetch ended with exit code 1" in sim.status.condition("Failed").message
    assert "startupDeadlineSeconds" in sim.status.condition("Failed").message
    assert sim.status.incident_count == 0


def test_sidecar_crash_before_the_trainer_is_reported(sim: Sim) -> None:
    sim.tick()
    sim.tick()
    for body in sim.pods.values():
        looping = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s restarting failed container"}}
        body["status"] = {"phase": "Waiting", "initContainerStatuses": [{"name": "proxy", "state": looping}]}
    sim.tick()
    assert sim.status.summary == "ContainerCrashes"
    assert "Container proxy of gpt-w0 keeps exiting before the trainer starts" in sim.status.trouble.message


def test_what_a_kubelet_says_in_events_only_becomes_a_condition(sim: Sim) -> None:
    sim.tick()
    sim.tick()
    note = "failed to set up sandbox container: no addresses available"
    seen = sim.observe()
    pods = tuple(replace(pod, warnings=(("FailedCreatePodSandBox", note),), phase="Pending") for pod in seen.pods)
    plan = decide(replace(seen, pods=pods), sim.now)
    assert plan.status.trouble is not None
    assert plan.status.trouble.reason == "PodStartFailed"
    assert plan.status.trouble.message == f"Pod gpt-w0 does not start on {sim.node_of('gpt-w0')}: {note}"


@pytest.mark.parametrize("gang", ["Gates", "None"])
def test_a_scheduler_that_does_not_exist_is_named(make_sim: Make, gang: str) -> None:
    sim = make_sim(startupDeadlineSeconds=300, scheduling={"gang": gang})
    sim.body["spec"]["workers"]["template"]["spec"]["schedulerName"] = "volcanoo"
    sim.unplaceable = True
    sim.run(100, until=lambda: sim.status.trouble is not None)
    assert sim.status.summary == "NoSchedulerResponse"
    assert 'is scheduler "volcanoo" running?' in sim.status.condition("Degraded").message
    sim.run(400, until=lambda: sim.status.holds("Failed"))


def test_warning_of_an_unscheduled_pod_comes_first(sim: Sim) -> None:
    """A resource claim template that is not there: the scheduler waits for the claim, and reports nothing."""
    sim.unplaceable = True
    sim.tick()
    sim.tick()
    note = 'resource claim template "eight": resourceclaimtemplate.resource.k8s.io "eight" not found'
    later = sim.now + DEFAULT_TIMINGS.scheduler_heard
    seen = sim.observe()
    pods = tuple(replace(pod, warnings=(("FailedResourceClaimCreation", note),)) for pod in seen.pods)
    trouble = decide(replace(seen, pods=pods), later).status.trouble
    assert trouble is not None
    assert trouble.reason == "NoSchedulerResponse"
    assert trouble.message == f"Pod gpt-w0 is unscheduled: FailedResourceClaimCreation: {note}"


def test_pod_without_a_kubelet_report_was_not_collected(sim: Sim) -> None:
    """The garbage collector is not named as the cause."""
    sim.run(5)
    body = copy.deepcopy(next(iter(sim.pods.values())))
    body["status"] = {"phase": "Failed", "reason": "OutOfcpu"}
    assert parse_pod(body).terminal
    body["status"] = {
        "phase": "Failed",
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}],
    }
    assert not parse_pod(body).terminal


def test_deadline_counts_from_the_first_problem(make_sim: Make) -> None:
    """The end of the problem resets the deadline."""
    sim = make_sim(startupDeadlineSeconds=60)
    sim.tick()
    sim.tick()
    waiting(sim, "ErrImagePull", "x")
    sim.run(40)
    for body in sim.pods.values():
        body["status"] = {"phase": "Pending"}
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    assert sim.status.trouble is None
    sim.run(60)
    assert not sim.status.terminal
