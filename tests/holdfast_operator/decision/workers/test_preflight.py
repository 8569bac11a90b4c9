"""A worker joins once its node has passed the checks; a node that did not is left and named, where that helps."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim import Make, Sim

from holdfast_operator.api.spec.preflight import PreflightSpec
from holdfast_operator.api.spec.spec import parse_spec
from holdfast_operator.api.status import Worker
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.decision.workers.unreachable_peers import to_blame
from holdfast_operator.errors import UnreadableError
from holdfast_operator.manifests.pod import pod as pod_manifest
from holdfast_operator.views import parse_report

Body = dict[str, Any]
WELL = {"GPU": "Passed", "Storage": "Passed", "ObjectStore": "Passed", "Network": "Passed", "Clock": "Passed"}
NODES = ("node-1", "node-2", "node-3", "node-4")


@pytest.fixture
def asked(make_sim: Make) -> Callable[..., Any]:
    """A job with a preflight, on nodes that are all well unless said otherwise."""

    def make(*, bad: dict[str, Body] | None = None, everywhere: Body | None = None, **more: Any) -> Any:
        group = {key: more.pop(key) for key in ("checks", "onFailure") if key in more}
        sim = make_sim(preflight=group, **more)
        sim.preflights = {node: {**WELL, **(everywhere or {})} for node in NODES}
        for node, results in (bad or {}).items():
            sim.preflights[node] |= results
        return sim

    return make


def trains(sim: Sim) -> Callable[[], bool]:
    return lambda: sim.status.summary == "Training"


def told(sim: Sim, reason: str) -> list[str]:
    return [message for known, message in sim.events if known == reason]


def test_nobody_joins_before_the_checks_are_over(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-2": {"GPU": "Running"}}, minimum=3)
    sim.run(60)
    assert sim.world is None
    sim.preflights["node-2"] = WELL
    sim.run(30, until=trains(sim))
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert sim.counted == []


def test_a_node_that_fails_is_left_and_named_in_the_same_words(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-2": {"GPU": "Failed"}}, minimum=3)
    shown: set[str] = set()
    sim.run(60, until=lambda: bool(shown.add(sim.plan().message)) or sim.status.summary == "Training")
    assert "node-2" not in {sim.node_of(name) for name in sim.world_names()}
    (avoided,) = sim.status.avoided
    (event,) = set(told(sim, "PreflightFailed"))
    assert (avoided.node, avoided.failed_checks, avoided.message) == ("node-2", ("GPU",), event)
    assert event == (
        "gpt-w1 failed its preflight on node-2: GPU: GPU is Failed; moving to another node, and the job places no"
        " worker there for 1 h"
    )
    assert event in shown
    assert sim.counted == []
    assert sim.status.incidents == ()


@pytest.mark.parametrize("check", ["Storage", "ObjectStore", "Clock"])
def test_what_fails_on_each_node_leaves_none(asked: Callable[..., Any], check: str) -> None:
    sim = asked(everywhere={check: "Failed"}, minimum=3)
    sim.run(120)
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert sim.status.avoided == ()
    degraded = sim.status.condition("Degraded")
    assert (degraded.status, degraded.reason) == (True, "PreflightFailed")
    assert f"{check}: {check} is Failed; the check fails on every node, so no node is avoided" in degraded.message
    sim.preflights = dict.fromkeys(NODES, WELL)
    sim.run(30, until=trains(sim))
    assert not sim.status.holds("Degraded")


def test_a_store_that_one_node_does_not_reach_is_that_nodes(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-2": {"ObjectStore": "Failed"}}, minimum=3)
    sim.run(60, until=trains(sim))
    assert [(entry.node, entry.failed_checks) for entry in sim.status.avoided] == [("node-2", ("ObjectStore",))]


@pytest.mark.parametrize("replicas", [1, 3])
def test_what_the_job_says_wrong_is_no_nodes(asked: Callable[..., Any], replicas: int) -> None:
    sim = asked(everywhere={"ObjectStore": "Failed"}, replicas=replicas, minimum=replicas)
    sim.refused = {"ObjectStore"}
    sim.run(120)
    assert (sim.status.avoided, len(sim.created_names)) == ((), replicas)
    degraded = sim.status.condition("Degraded")
    assert (degraded.status, degraded.reason) == (True, "PreflightFailed")
    assert degraded.message == (
        "gpt-w0 failed its preflight on node-1: ObjectStore: ObjectStore is Failed; this is not a node problem."
        " New pods read a changed Secret: delete the waiting ones"
    )
    sim.preflights = dict.fromkeys(NODES, WELL)
    sim.run(30, until=trains(sim))
    assert not sim.status.holds("Degraded")


def test_wrong_credentials_blame_no_node_though_others_passed(asked: Callable[..., Any]) -> None:
    sim = asked(minimum=3)
    sim.run(60, until=trains(sim))
    sim.preflights = {node: {**WELL, "ObjectStore": "Failed"} for node in NODES}
    sim.refused = {"ObjectStore"}
    sim.delete(sim.uid("gpt-w1"))
    sim.run(120)
    assert sim.status.avoided == ()


def test_running_checks_delay_the_blame_of_a_node(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-1": {"Storage": "Failed"}, "node-2": {"Storage": "Running"}}, replicas=2, minimum=2)
    sim.run(20)
    assert sim.status.avoided == ()
    sim.preflights["node-2"]["Storage"] = "Passed"
    sim.run(30, until=trains(sim))
    assert [entry.node for entry in sim.status.avoided] == ["node-1"]


def test_who_never_ends_its_checks_is_not_waited_for(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-1": {"Storage": "Failed"}, "node-2": {"Storage": "Running"}}, replicas=2, minimum=2)
    sim.run(120, until=lambda: bool(sim.status.avoided))
    assert [entry.node for entry in sim.status.avoided] == ["node-1"]


def test_gpus_are_never_shared_so_each_bad_node_is_left(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-1": {"GPU": "Failed"}, "node-2": {"GPU": "Failed"}}, replicas=2, minimum=2)
    sim.run(60, until=trains(sim))
    assert sorted(entry.node for entry in sim.status.avoided) == ["node-1", "node-2"]
    assert {sim.node_of(name) for name in sim.world_names()} == {"node-3", "node-4"}


def test_a_lone_worker_tries_a_second_node_and_no_third(asked: Callable[..., Any]) -> None:
    sim = asked(everywhere={"Storage": "Failed"}, replicas=1, minimum=1)
    sim.run(120)
    assert [entry.node for entry in sim.status.avoided] == ["node-1"]
    assert sim.created_names == ["gpt-w0", "gpt-w1"]
    assert sim.status.summary == "PreflightFailed"


def test_where_no_other_node_has_room_the_job_waits_for_the_mend(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-1": {"GPU": "Failed"}}, replicas=2, minimum=2, nodes=1)
    sim.run(60)
    degraded = sim.status.condition("Degraded")
    assert degraded.reason == "PreflightFailed"
    assert (
        "no other node has capacity: repair the node, add another one, or set preflight.onFailure" in degraded.message
    )
    sim.preflights["node-1"] = WELL
    sim.run(30, until=trains(sim))


def test_worker_that_fits_nowhere_keeps_no_other_on_an_unfit_node(asked: Callable[..., Any]) -> None:
    """All nodes are spot capacity, and one worker waits for a node that is not."""
    sim = asked(bad={"node-2": {"GPU": "Failed"}}, minimum=2, nodes=4)
    sim.body["spec"]["workers"]["onDemandReplicas"] = 1
    for node in sim.nodes.values():
        node["metadata"]["labels"]["karpenter.sh/capacity-type"] = "spot"
        node["status"]["allocatable"]["cpu"] = "1"
    sim.run(120, until=lambda: len(sim.world_names()) == 2)
    assert "node-2" not in {sim.node_of(name) for name in sim.world_names()}
    assert [entry.node for entry in sim.status.avoided] == ["node-2"]


def test_failed_preflight_fails_the_job_by_its_deadline(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-1": {"GPU": "Failed"}}, nodes=1, replicas=1, minimum=1, startupDeadlineSeconds=60)
    sim.run(90, until=lambda: sim.status.holds("Failed"))
    assert sim.status.condition("Failed").reason == "PreflightFailed"


def test_a_replacement_is_checked_as_well(asked: Callable[..., Any]) -> None:
    sim = asked(minimum=3)
    sim.run(60, until=trains(sim))
    bad = sim.node_of("gpt-w1")  # where its replacement comes first
    sim.preflights[bad]["GPU"] = "Failed"
    sim.delete(sim.uid("gpt-w1"))
    sim.run(120, until=lambda: bool(sim.status.avoided))
    sim.run(120, until=trains(sim))
    assert [entry.node for entry in sim.status.avoided] == [bad]
    assert bad not in {sim.node_of(name) for name in sim.world_names()}
    assert sim.counted == ["Interruption"]


def test_who_has_joined_is_not_judged_again(asked: Callable[..., Any]) -> None:
    sim = asked(minimum=3)
    sim.run(60, until=trains(sim))
    sim.preflights = {node: {"GPU": "Failed", "Clock": "Running"} for node in NODES}
    sim.run(60)
    assert (sim.status.summary, sim.status.avoided) == ("Training", ())
    assert sim.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]


def test_an_elastic_job_begins_without_the_worker_that_waits(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-2": {"GPU": "Running"}}, minimum=2)
    sim.run(90, until=lambda: sim.world is not None)
    assert len(sim.world["members"]) == 2


def test_fail_fails_the_job_that_has_not_trained(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-2": {"GPU": "Failed"}}, onFailure="Fail")
    sim.run(60, until=lambda: sim.status.holds("Failed"))
    failed = sim.status.condition("Failed")
    assert failed.reason == "PreflightFailed"
    assert failed.message == ("gpt-w1 failed its preflight on node-2: GPU: GPU is Failed (preflight.onFailure: Fail)")


def test_fail_does_not_end_a_job_that_trains(asked: Callable[..., Any]) -> None:
    sim = asked(minimum=3, onFailure="Fail")
    sim.run(60, until=trains(sim))
    bad = sim.node_of("gpt-w1")  # where its replacement comes first
    sim.preflights[bad]["GPU"] = "Failed"
    sim.delete(sim.uid("gpt-w1"))
    sim.run(120, until=lambda: bool(sim.status.avoided))
    sim.run(120, until=trains(sim))


def test_ignore_waits_for_nothing_and_tells_once(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-1": {"GPU": "Running"}, "node-2": {"GPU": "Failed"}}, onFailure="Ignore", minimum=3)
    sim.run(60, until=trains(sim))
    sim.run(30)
    (event,) = told(sim, "PreflightIgnored")
    assert event.startswith("gpt-w1 failed its preflight on node-2: GPU: GPU is Failed; joining anyway")


def test_pods_that_were_asked_nothing_join(asked: Callable[..., Any]) -> None:
    sim = asked()
    sim.preflights = {}
    sim.run(60, until=trains(sim))


def test_operator_killed_after_each_action_converges(asked: Callable[..., Any]) -> None:
    sim = asked(bad={"node-2": {"GPU": "Failed"}}, minimum=3)
    for number in range(90):
        after = iter([number % 3])
        sim.tick(1.0, cut=lambda after=after: next(after, None))
    sim.run(60, until=trains(sim))
    assert [entry.node for entry in sim.status.avoided] == ["node-2"]
    assert sim.created_names == ["gpt-w0", "gpt-w1", "gpt-w2", "gpt-w3"]


# The network


def cut(sim: Sim, *links: tuple[str, str]) -> None:
    """No packet passes between these nodes; a worker that has joined has found all that it asked for before."""
    sim.preflights = {node: dict(WELL) for node in NODES}
    sim.cut_links = frozenset(frozenset(link) for link in links)


def test_the_worker_that_most_others_do_not_reach_is_left(asked: Callable[..., Any]) -> None:
    sim = asked(minimum=3, nodes=4)
    cut(sim, ("node-1", "node-2"), ("node-1", "node-3"))
    sim.run(120, until=trains(sim))
    (avoided,) = sim.status.avoided
    assert (avoided.node, avoided.failed_checks) == ("node-1", ("Network",))
    assert "gpt-w0 failed its preflight on node-1: Network: not reached by gpt-w1, gpt-w2" in avoided.message


def test_of_two_the_newer_leaves_first_then_the_elder(asked: Callable[..., Any]) -> None:
    sim = asked(replicas=2, minimum=2, nodes=4)
    cut(sim, ("node-1", "node-2"), ("node-1", "node-3"), ("node-1", "node-4"))
    sim.run(120, until=trains(sim))
    assert sorted(entry.node for entry in sim.status.avoided) == ["node-1", "node-2"]
    assert {sim.node_of(name) for name in sim.world_names()} == {"node-3", "node-4"}


def test_new_worker_that_misses_a_member_leaves(asked: Callable[..., Any]) -> None:
    """No member leaves."""
    sim = asked(minimum=2, nodes=5)
    sim.run(60, until=trains(sim))
    cut(sim, ("node-2", "node-4"))
    sim.preflights["node-5"] = WELL
    sim.kill_node("node-1")
    sim.node_unready("node-1")
    sim.run(120, until=lambda: "node-4" in {entry.node for entry in sim.status.avoided})
    sim.run(120, until=lambda: sim.status.summary == "Training" and len(sim.world_names()) == 3)
    assert {"gpt-w1", "gpt-w2"} <= set(sim.world_names())


def test_no_node_is_avoided_if_no_worker_reaches_another(asked: Callable[..., Any]) -> None:
    names = [f"node-{n}" for n in range(1, 9)]
    sim = asked(replicas=2, minimum=2, nodes=8)
    cut(sim, *((one, other) for one in names for other in names if one < other))
    sim.preflights = {node: dict(WELL) for node in names}
    sim.run(300)
    assert len(sim.status.avoided) == 3
    assert sim.status.summary == "PreflightFailed"


PODS = tuple("abcdefgh")
PAIRS = st.lists(st.tuples(st.sampled_from(PODS), st.sampled_from(PODS)).filter(lambda p: p[0] != p[1]), max_size=20)


@settings(deadline=None)
@given(PAIRS, st.permutations(PODS), st.sets(st.sampled_from(PODS)))
def test_each_pair_has_one_to_blame_and_no_member_is(pairs: Any, order: list[str], members: set[str]) -> None:
    blamed = to_blame(pairs, [uid for uid in order if uid not in members])
    assert not blamed & members
    assert all(set(pair) & blamed or set(pair) <= members for pair in pairs)
    assert all(any(uid in pair for pair in pairs) for uid in blamed)


def test_one_that_nobody_reaches_is_blamed_alone() -> None:
    assert to_blame([("b", "a"), ("c", "a"), ("d", "a")], list("dcba")) == {"a"}


# The spec, the pods, the reports


def spec_of(preflight: Any, **container: Any) -> Any:
    containers = [{"name": "trainer", "image": "x", **container}]
    workers = {"replicas": 1, "processesPerWorker": 1, "template": {"spec": {"containers": containers}}}
    return parse_spec({"workers": workers, "preflight": preflight})


def test_without_the_group_nothing_is_asked() -> None:
    assert spec_of(None).preflight is None
    assert spec_of({}).preflight == PreflightSpec()


@pytest.mark.parametrize(
    ("preflight", "says"),
    [
        ([], "spec.preflight is missing or no object"),
        ({"checks": ["Moon"]}, "checks must be some of GPU, Storage, ObjectStore, Network, Clock, not 'Moon'"),
        ({"checks": "GPU"}, "spec.preflight.checks"),
        ({"onFailure": "Pray"}, "onFailure must be one of AvoidNode, Fail, Ignore"),
        ({"timeoutSeconds": 0}, "timeoutSeconds must be an integer"),
        ({"storage": {"minFreeBytes": "much"}}, "storage.minFreeBytes must be a quantity above 0"),
        ({"storage": {"minWriteBytesPerSecond": "0Mi"}}, "storage.minWriteBytesPerSecond must be a quantity"),
        ({"clock": {"maxSkewSeconds": -1}}, "clock.maxSkewSeconds"),
    ],
)
def test_a_spec_that_cannot_be_read_is_named(preflight: Any, says: str) -> None:
    with pytest.raises(UnreadableError, match=says):
        spec_of(preflight)


def env_of(observed: Observed, spec: Any, container: str) -> Body:
    made = pod_manifest(observed.job, spec, Worker(incarnation=0, batch=0), observed.platform)["spec"]
    found = next(one for one in (*made["containers"], *made["initContainers"]) if one["name"] == container)
    return {var["name"]: var.get("value") for var in found["env"] if "PREFLIGHT" in var["name"]}


def test_each_container_is_told_its_part(observed: Observed) -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    spec = spec_of(
        {"storage": {"minFreeBytes": "50Gi", "minWriteBytesPerSecond": "100Mi"}, "timeoutSeconds": 30}, **gpus
    )
    assert env_of(observed, spec, "trainer") == {
        "HOLDFAST_PREFLIGHT_FREE_BYTES": str(50 << 30),
        "HOLDFAST_PREFLIGHT_WRITE_BYTES": str(100 << 20),
        "HOLDFAST_PREFLIGHT_OBJECT": "1",
        "HOLDFAST_PREFLIGHT_SECONDS": "30",
    }
    assert env_of(observed, spec, "holdfast-sidecar") == {
        "HOLDFAST_PREFLIGHT": "GPU,Storage,ObjectStore,Network,Clock",
        "HOLDFAST_PREFLIGHT_SECONDS": "30",
        "HOLDFAST_PREFLIGHT_GPUS": "8",
        "HOLDFAST_PREFLIGHT_SKEW_SECONDS": "5",
    }


@pytest.mark.parametrize(
    ("limits", "count"),
    [({}, "0"), ({"nvidia.com/gpu": 2}, "2"), ({"nvidia.com/mig-1g.10gb": 3}, "1"), ({"nvidia.com/gpu": "x"}, "0")],
)
def test_whole_gpus_are_counted(observed: Observed, limits: Body, count: str) -> None:
    spec = spec_of({}, resources={"limits": limits})
    assert env_of(observed, spec, "holdfast-sidecar")["HOLDFAST_PREFLIGHT_GPUS"] == count


def test_without_a_preflight_pods_are_as_ever(observed: Observed) -> None:
    assert env_of(observed, spec_of(None), "trainer") == env_of(observed, spec_of(None), "holdfast-sidecar") == {}
    assert env_of(observed, spec_of({"checks": ["Clock"]}), "trainer") == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("name", "result", "x")), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.one_of(JSON, st.fixed_dictionaries({"checks": JSON})))
def test_rubbish_in_a_report_is_read_as_far_as_it_goes(sent: Any) -> None:
    noon = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
    report = parse_report({"version": 1, "pod": {"uid": "u"}, "preflight": sent}, noon)
    assert report is not None
    assert report.preflight is None or all(isinstance(check.name, str) for check in report.preflight.checks)


def test_failed_node_of_a_spare_does_not_fail_the_job(asked: Callable[..., Any]) -> None:
    """The node of a worker would fail the job."""
    sim = asked(bad={"node-3": {"GPU": "Failed"}}, replicas=2, minimum=2, onFailure="Fail")
    sim.body["spec"]["workers"]["spares"] = 1
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    for node in ("node-1", "node-2"):  # the workers' own checks take longer
        sim.preflights[node] = {**WELL, "GPU": "Running"}
    sim.run(20)
    assert not sim.status.terminal
    assert [entry.node for entry in sim.status.avoided] == ["node-3"]
    for node in ("node-1", "node-2"):
        sim.preflights[node] = WELL
    sim.run(30, until=trains(sim))
