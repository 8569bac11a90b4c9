"""Whatever passes the schema is decided about, and costs no other job anything.

Resources are drawn from the CRD itself: what it types is drawn within its bounds, what it leaves to the API server's
judgement of the pod (``x-kubernetes-preserve-unknown-fields``) is a pod's value with parts of it exchanged, or junk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from holdfast_operator.api import parse_job
from holdfast_operator.capacity import Ask, Room, too_big
from holdfast_operator.manifests import pod
from holdfast_operator.observe import rival_of
from holdfast_operator.quantities import quantity
from holdfast_operator.seen import NodeView, parse_pod, parse_report

Make = Callable[..., Any]
Json = dict[str, Any]
SCHEMA = yaml.safe_load((Path(__file__).parents[2] / "crds" / "holdfast.dev_faulttolerantjobs.yaml").read_text())
SPEC = SCHEMA["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
# No shrinking: it would take longer than all else here.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SETTINGS = settings(deadline=None, max_examples=60, phases=PHASES, suppress_health_check=list(HealthCheck))

EXPRESSION = {"key": "kind", "operator": "In", "values": ["gpu"]}
TERMS = {"nodeSelectorTerms": [{"matchExpressions": [EXPRESSION], "matchFields": [EXPRESSION]}]}
AWAY = {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app": "x"}, "matchExpressions": [EXPRESSION]}}
# What the operator itself reads of a pod's spec, as a user would write it.
POD: Json = {
    "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 1}},
    "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}],
    "restartPolicy": "Always",
    "overhead": {"cpu": "10m"},
    "nodeSelector": {"kubernetes.io/hostname": "node-1"},
    "affinity": {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": TERMS},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [AWAY]},
    },
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}],
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "terminationGracePeriodSeconds": 30,
    "imagePullSecrets": [{"name": "pull"}],
    "resourceClaims": [{"name": "gpu"}],
    "hostNetwork": True,
}
AMOUNTS = (
    "NaN",
    "-NaN",
    "sNaN",
    "Infinity",
    "-1",
    "1e999999",
    "1e-999999",
    "9" * 64,
    "1e99999999999999999999",
    "1Ki",
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
JUNK = st.recursive(
    SCALARS | st.sampled_from(AMOUNTS),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from((*POD, "cpu", "name")), inner, max_size=2)
    ),
    max_leaves=4,
)


@st.composite
def spoiled(draw: st.DrawFn, value: Any) -> Any:
    """The same with some parts exchanged for junk."""
    if draw(st.integers(0, 7)) == 0:
        return draw(JUNK)
    if isinstance(value, dict):
        return {key: draw(spoiled(item)) for key, item in value.items()}
    if isinstance(value, list):
        return [draw(spoiled(item)) for item in value]
    return value


def values(schema: Json, name: str = "") -> st.SearchStrategy[Any]:
    """What this part of the schema takes. Fields that take anything are often left out."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from((1, 50, 86400, "auto", "Auto", "Off", "30s", "999999h"))
    match schema.get("type"):
        case "integer":
            return st.integers(schema.get("minimum", 0), min(schema.get("maximum", 2**31 - 1), 2**31 - 1))
        case "boolean":
            return st.booleans()
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True).map(lambda text: text[: schema["maxLength"]])
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 9), 9))
        case "array":
            return _arrays(schema)
        case "object":
            return _objects(schema)
    return spoiled(POD[name]) if name in POD else JUNK


def refused(name: str, part: Json) -> bool:
    """Fields of a pod that the schema types only to refuse them by a rule of its own."""
    return name in ("nodeName", "schedulingGates", "restartPolicy") and "type" in part


def _arrays(schema: Json) -> st.SearchStrategy[Any]:
    keys = schema.get("x-kubernetes-list-map-keys")
    unique = (lambda item: tuple(item[key] for key in keys)) if keys else repr
    most = min(schema.get("maxItems", 3), 3)
    return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=most, unique_by=unique)


def _objects(schema: Json) -> st.SearchStrategy[Any]:
    parts = {name: part for name, part in schema.get("properties", {}).items() if not refused(name, part)}
    known = {name: values(part, name) for name, part in parts.items()}
    if "additionalProperties" in schema:
        return st.dictionaries(st.text(min_size=1, max_size=4), values(schema["additionalProperties"]), max_size=2)
    wanted = set(schema.get("required", ()))
    free = {name for name, part in parts.items() if len(part) <= 2 and name not in POD}
    return st.fixed_dictionaries(
        {name: strategy for name, strategy in known.items() if name in wanted},
        optional={name: strategy for name, strategy in known.items() if name not in wanted | free},
    )


SPECS = values(SPEC)


def odd(sim: Any, spec: Json) -> Any:
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
    if sim.status.status == "Unreadable":
        assert sim.plan().requeue_after is None, "only a change can mend it"
        assert not sim.names()


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
    assert Room([node], [], parse_job({}).created).place(Ask(pod_spec=asked, count=3)) <= 3
    assert len(too_big(asked, [node])) < 200


def test_a_template_of_endless_alternatives_is_left_to_the_scheduler() -> None:
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
    assert Room(nodes, [], parse_job({}).created).place(Ask(pod_spec=spec, count=1024)) == 1024
    assert time.process_time() - started < 20


def test_pods_of_one_job_share_their_template(trained: Any) -> None:
    """A large template times a thousand workers would be more than the operator's memory."""
    seen = trained.observe()
    assert seen.job.spec is not None
    manifest = pod(seen.job, seen.job.spec, seen.status.workers[0], seen.platform)
    command = seen.job.spec.pod_spec["containers"][0]["command"]
    assert manifest["spec"]["containers"][0]["command"] is command


@pytest.mark.parametrize(
    "left", ["[" * 4000, '{"version": 1, "traceback": 5}', '{"version": 1, "message": "\\ud800"}']
)
def test_whatever_a_container_leaves_behind_is_read(left: str) -> None:
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 1, "message": left}}}
    spec = {"containers": [{"name": "trainer"}]}
    view = parse_pod({"metadata": {}, "spec": spec, "status": {"containerStatuses": [ended]}})
    assert view.exit is not None
    assert view.exit.words().encode() is not None


@pytest.mark.parametrize("number", [10**400, float("inf"), -float("inf"), float("nan")])
def test_numbers_that_no_status_can_hold_are_not_taken(number: float, trained: Any) -> None:
    (at, body), *_ = trained.heard.values()
    launcher = {**body["launcher"], "loss": number, "throughput": number}
    report = parse_report({**body, "launcherSilentSeconds": number, "launcher": launcher}, at)
    assert report is not None
    assert (report.loss, report.throughput, report.silent_seconds) == (None, None, None)
