"""Whatever passes the schema is decided about, and costs no other job anything.

Resources are drawn from the CRD itself: see ``odd_resources``.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from odd_resources import AMOUNTS, AWAY, EXPRESSION, JUNK, SPECS
from sim import Make, Sim

from holdfast_operator.api.job import parse_job
from holdfast_operator.api.quantities import quantity
from holdfast_operator.manifests.pod import pod
from holdfast_operator.scheduling.capacity import FreeCapacity, PodRequest, too_big
from holdfast_operator.scheduling.waiting_gang import rival_of
from holdfast_operator.views import NodeView, parse_pod, parse_report

Json = dict[str, Any]
# No shrinking: it would take longer than all else here.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SETTINGS = settings(deadline=None, max_examples=60, phases=PHASES, suppress_health_check=list(HealthCheck))


def odd(sim: Sim, spec: Json) -> Any:
    """The job of the simulation with another spec, made before all others."""
    sim.body["spec"] = spec
    sim.body["spec"]["workers"]["replicas"] = min(spec["workers"]["replicas"], 8)
    return sim


@SETTINGS
@given(spec=SPECS)
def test_a_resource_that_passes_the_schema_is_decided_about(make_sim: Make, spec: Json) -> None:
    sim = odd(make_sim(), spec)
    for _ in range(4):
        sim.tick(20.0)
    assert sim.plan().reason
    if sim.status.summary == "InvalidSpec":
        assert sim.plan().requeue_after is None, "only a change can mend it"
        assert not sim.names()


SECRET = {"checkpoint": {"object": {"url": "s3://b/p", "secretRef": {"name": "keys"}}}}


@pytest.mark.parametrize("junk", [5, "keys", {"secretRef": {"name": "keys"}}, [None]])
def test_variables_from_what_no_pod_could_have_are_named(sim: Sim, junk: Any) -> None:
    sim.body["spec"] |= SECRET
    sim.body["spec"]["workers"]["template"]["spec"]["containers"][0]["envFrom"] = junk
    sim.settle()
    assert sim.status.summary == "InvalidSpec"
    assert "spec.workers.template.spec.containers[0].envFrom" in sim.plan().message


@pytest.mark.parametrize(
    ("amount", "told"),
    [("²", "0"), ("9" * 5000, "0"), ("-1", "0"), ("1k", "1000"), (2, "2"), ("4", "4"), (None, "0")],
)
def test_a_preflight_is_told_of_as_many_gpus_as_are_asked_for(sim: Sim, amount: Any, told: str) -> None:
    sim.body["spec"]["preflight"] = {}
    sim.body["spec"]["workers"]["processesPerWorker"] = 1
    (trainer,) = sim.body["spec"]["workers"]["template"]["spec"]["containers"]
    trainer["resources"]["limits"] = {"nvidia.com/gpu": amount}
    sim.settle()
    sidecar = next(iter(sim.pods.values()))["spec"]["initContainers"][-1]
    assert {"name": "HOLDFAST_PREFLIGHT_GPUS", "value": told} in sidecar["env"]


@SETTINGS
@given(spec=SPECS, seen=st.booleans())
def test_a_job_beside_any_other_trains(make_sim: Make, spec: Json, seen: bool) -> None:
    """``seen``: whether the other's own pass came first, as it does except for a moment."""
    other, good = odd(make_sim(name="alpha", nodes=2), spec), make_sim(name="beta", replicas=2, minimum=2, nodes=2)
    good.peers = [other]
    if seen:
        other.settle()
    good.run(200, step=4.0, until=lambda: len(good.world_names()) == 2 or waits_its_turn(other, good))


def waits_its_turn(other: Any, good: Any) -> bool:
    """The other is an older gang which the cluster could hold: then it may go first."""
    return rival_of(other.body) is not None and good.plan().reason == "WaitingForCapacity"


@settings(SETTINGS, max_examples=150)
@given(amount=st.sampled_from(AMOUNTS) | JUNK)
def test_any_amount_is_one_that_can_be_weighed(amount: Any) -> None:
    assert 0 <= quantity(amount) < 2**63
    asked = {"containers": [{"resources": {"requests": {"cpu": amount, "memory": amount}}}]}
    node = NodeView(name="n", allocatable={"cpu": "4", "memory": "8Gi", "pods": "10"})
    assert FreeCapacity([node], [], parse_job({}).created).place(PodRequest(pod_spec=asked, count=3)) <= 3
    assert len(too_big(asked, [node])) < 200


def test_too_many_alternatives_are_left_to_the_scheduler() -> None:
    """Weighing it would cost each pass of each other job seconds."""
    terms = [{"matchExpressions": [EXPRESSION] * 10}] * 20_000
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [AWAY] * 20_000}
    many = {f"example.com/r{number}": "0" for number in range(20_000)}
    spec = {
        "containers": [{"resources": {"requests": many}}],
        "affinity": {"nodeAffinity": required, "podAntiAffinity": apart},
    }
    nodes = [NodeView(name=f"n{number}", allocatable={"cpu": "4", "pods": "10"}) for number in range(200)]
    started = time.process_time()
    assert FreeCapacity(nodes, [], parse_job({}).created).place(PodRequest(pod_spec=spec, count=1024)) == 1024
    assert time.process_time() - started < 20


def test_pods_of_one_job_share_their_template(trained: Sim) -> None:
    """A large template times a thousand workers would be more than the operator's memory."""
    seen = trained.observe()
    assert seen.job.spec is not None
    manifest = pod(seen.job, seen.job.spec, seen.status.workers[0], seen.platform)
    command = seen.job.spec.pod_spec["containers"][0]["command"]
    assert manifest["spec"]["containers"][0]["command"] is command


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ("[" * 4000, "[" * 4000),
        ('{"version": 1, "traceback": 5}', ""),
        ('{"version": 1, "message": "\\ud800"}', "?"),
    ],
)
def test_whatever_a_container_leaves_behind_is_read(left: str, words: str) -> None:
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 1, "message": left}}}
    spec = {"containers": [{"name": "trainer"}]}
    view = parse_pod({"metadata": {}, "spec": spec, "status": {"containerStatuses": [ended]}})
    assert view.exit is not None
    assert view.exit.words() == words


@pytest.mark.parametrize("number", [10**400, float("inf"), -float("inf"), float("nan")])
def test_numbers_that_no_status_can_hold_are_not_taken(number: float, trained: Sim) -> None:
    (at, body), *_ = trained.heard.values()
    launcher = {**body["launcher"], "loss": number, "throughput": number}
    report = parse_report({**body, "launcherSilentSeconds": number, "launcher": launcher}, at)
    assert report is not None
    assert (report.loss, report.throughput, report.silent_seconds) == (None, None, None)
