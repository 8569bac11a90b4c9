"""Two operators on one cluster: one leads by the Lease, and whatever becomes of it, the other goes on from there.

Each reaches the API server through a proxy of its own, which makes it slow, cuts it off, or lets its watches expire;
both tell the time by a file. Whatever happens, the next pass converges: one incident, one generation, no pod twice.
"""

from __future__ import annotations

import http.client
import json
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from players import SHORT_WAITS, Operator
from stage import Stage
from waiting import wait_until

from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.fakes.api_faults import ApiProxy, Mode, api_faults

JOBS = 40
LEASE_SECONDS = 15  # with less, a machine that stands still for a moment changes the leader


class Pair:
    """Two replicas. To players of agents it is the one that leads, as the sidecar finds it."""

    def __init__(self, one: Any, other: Any, proxies: dict[Any, ApiProxy], shift: Path) -> None:
        self.leader, self.standby = one, other
        self._proxies = proxies
        self._shift = shift
        self.set_clock(0)

    def set_clock(self, seconds: int) -> None:
        """The time of day of both, beside the machine's."""
        fresh = self._shift.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(self._shift)

    def proxy(self, one: Any) -> ApiProxy:
        """Between one of them and the API server."""
        return self._proxies[one]

    def become(self, mode: Mode) -> None:
        """Of both."""
        for proxy in self._proxies.values():
            proxy.become(mode)

    def one_leads(self) -> bool:
        """Whether one does now; then it is the leader."""
        return leads(self.leader) or self.changed()

    @property
    def agents_port(self) -> int:
        return int(self.leader.agents_port)

    def log(self) -> str:
        """Of both, the leader's last."""
        return str(self.standby.log()) + str(self.leader.log())

    def changed(self) -> bool:
        """Whether the other one leads now; then it is the leader."""
        if not leads(self.standby):
            return False
        self.leader, self.standby = self.standby, self.leader
        return True


@pytest.fixture(scope="module")
def operator(rights: Path, cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both of them, with a Lease that does not last long. They end without complaint."""
    folder = tmp_path_factory.mktemp("pair")
    program = (*SHORT_WAITS, str(folder / "shift"))
    settings = {"HOLDFAST_LEASE_SECONDS": str(LEASE_SECONDS), "HOLDFAST_RELIST_SECONDS": "5"}
    with ExitStack() as stack:
        proxies = {}
        for number in range(2):
            proxy = stack.enter_context(api_faults(cluster.state.server, cluster.state.pki.certificate_file))
            config = proxy.kubeconfig(rights, folder / f"{number}.kubeconfig")
            proxies[Operator(config, folder, program, **settings)] = proxy
        pair = Pair(*proxies, proxies, folder / "shift")
        for one in proxies:
            one.start()
        yield pair
        for one in (pair.standby, pair.leader):
            assert one.stop() == 0, one.log()[-3000:]


@pytest.fixture(autouse=True)
def _settled(operator: Pair) -> None:
    """Whatever the test before has left."""
    wait_until(lambda: operator.leader.ready() and operator.standby.ready(), "both are ready")
    wait_until(operator.one_leads, "one leads")


def leads(one: Any) -> bool:
    """Whether it says so; one that begins anew right now says nothing."""
    try:
        return bool(one.ready() and one.metric("holdfast_leader"))
    except (OSError, http.client.HTTPException):
        return False


def holder(stage: Stage) -> tuple[str, int]:
    """Of the Lease, and how often it has changed hands."""
    lease = client.CoordinationV1Api(stage.api).read_namespaced_lease("holdfast-operator", OPERATOR_NAMESPACE)
    return str(lease.spec.holder_identity), int(lease.spec.lease_transitions)


def asked(stage: Stage, operator: Any) -> tuple[int, Any]:
    """The agents' API of one of the two, by who has no token."""
    core = client.CoreV1Api(stage.api)
    trust = core.read_namespaced_config_map("gpt-holdfast-ca", stage.namespace).data["ca.crt"]
    context = ssl.create_default_context(cadata=trust)
    connection = http.client.HTTPSConnection("127.0.0.1", operator.agents_port, timeout=60, context=context)
    try:
        connection.request("GET", "/v1/membership?after=0")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_standby_continues_for_a_killed_leader_without_repeats(stage: Stage, operator: Pair) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    assert holder(stage)[0] == operator.leader.name
    assert operator.standby.get("/readyz")[0] == 200
    assert operator.standby.metric("holdfast_leader") == 0
    known = (503, {"version": 1, "leader": f"https://127.0.0.1:{operator.leader.agents_port}"})
    stage.wait(lambda: asked(stage, operator.standby) == known, "the standby knows the way to the leader")
    before, transitions = {pod.metadata.uid for pod in stage.pods()}, holder(stage)[1]

    operator.leader.kill()
    stage.lose("gpt-w1", player)
    stage.wait(operator.changed, "the standby leads")
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")

    stage.wait(lambda: stage.status().get("incidents"), "it is counted")
    assert holder(stage) == (operator.leader.name, transitions + 1)
    assert [pod.metadata.name for pod in stage.pods()] == ["gpt-w0", "gpt-w1", "gpt-w2", "gpt-w3"]
    assert before <= {pod.metadata.uid for pod in stage.pods()}, "no pod was made anew"
    found = stage.status()
    assert [(one["cause"], one["pod"]) for one in found["incidents"]] == [("Infrastructure", "gpt-w1")]
    assert (found["incidentCount"], found["membership"]["generation"]) == (1, 2)
    operator.standby.start()
    assert operator.standby.metric("holdfast_leader") == 0


@pytest.mark.thorough
def test_jobs_changed_while_the_leader_is_lost_are_reconciled(stage: Stage, operator: Pair) -> None:
    """The next leader reconciles all of these jobs."""
    names = [f"many-{number}" for number in range(JOBS)]
    for name in names:
        stage.apply({**stage.job(name), "spec": {**stage.job(name)["spec"], "suspend": True}})
    stage.wait(lambda: all(stage.status(name).get("observedGeneration") == 1 for name in names), "each is known")

    operator.leader.kill()
    changed = {"spec": {"workers": {"replicas": 2}}}
    for name in names:
        group = ("holdfast.dev", "v1alpha1", stage.namespace, "faulttolerantjobs", name)
        stage.custom.patch_namespaced_custom_object(*group, changed)
    stage.wait(operator.changed, "the standby leads")
    stage.wait(lambda: all(stage.status(name).get("observedGeneration") == 2 for name in names), "each is gone over")
    assert all(stage.condition("Suspended", name)["status"] == "True" for name in names)
    operator.standby.start()


@pytest.mark.thorough
def test_leader_that_slept_starts_over_and_the_next_has_all_jobs(stage: Stage, operator: Pair) -> None:
    stage.nodes(2)
    player = stage.run(replicas=2)
    pods = {pod.metadata.uid for pod in stage.pods()}
    sleeper = operator.leader
    began = sleeper.began()
    sleeper.signal(signal.SIGSTOP)
    stage.wait(operator.changed, "the standby leads")
    step = player.step
    sleeper.signal(signal.SIGCONT)
    stage.wait(lambda: sleeper.began() > began and sleeper.ready(), "it stands by, in the same process")
    assert "the operator starts over: the Lease could not be renewed" in sleeper.log()
    assert sleeper.metric("holdfast_leader") == 0
    stage.wait(lambda: shown_step(stage) > step, "progress is shown")
    assert {pod.metadata.uid for pod in stage.pods()} == pods
    assert len(player.worlds) == 1


def test_a_leader_that_ends_by_itself_gives_the_lease_back(stage: Stage, operator: Pair) -> None:
    first = operator.leader
    assert first.stop() == 0
    stage.wait(operator.changed, "the standby leads")
    assert any("the Lease had been given back" in line["message"] for line in operator.leader.lines())
    first.start()


# The way to the API server


@pytest.fixture
def trained(stage: Stage, operator: Pair) -> Iterator[Any]:
    """A job that trains with three workers; at the end all ways are free again."""
    stage.nodes(3)
    yield stage.run(replicas=3, elasticity={"minReplicas": 2})
    operator.set_clock(0)
    operator.become(Mode.PASSING)
    for one in (operator.leader, operator.standby):
        operator.proxy(one).delay_seconds, operator.proxy(one).deaf = 0.0, False


def counted_once(stage: Stage, operator: Pair, before: set[str]) -> None:
    """One worker was lost, one was made, and everybody else is who it was. Agents follow whoever leads."""
    expected = ["gpt-w0", "gpt-w3", "gpt-w2"]
    stage.wait(lambda: operator.one_leads() and stage.recovered(expected), "the replacement trains")
    stage.wait(lambda: stage.status().get("incidents"), "it is counted")
    found = stage.status()
    assert [one["pod"] for one in found["incidents"]] == ["gpt-w1"]
    assert (found["incidentCount"], found["membership"]["generation"]) == (1, 2)
    now = {pod.metadata.name: pod.metadata.uid for pod in stage.pods()}
    assert now.keys() - {"gpt-w1"} == {"gpt-w0", "gpt-w2", "gpt-w3"}
    assert {now["gpt-w0"], now["gpt-w2"]} <= before
    generations = [world[0] for world in stage.launchers[-1].worlds]
    assert generations == sorted(generations)


def uids(stage: Stage) -> set[str]:
    return {pod.metadata.uid for pod in stage.pods()}


def test_an_api_server_that_is_away_ends_no_operator(stage: Stage, operator: Pair, trained: Any) -> None:
    first, other = operator.leader, operator.standby
    before, began = uids(stage), first.began()
    operator.become(Mode.AWAY)
    stage.lose("gpt-w1", trained)
    stage.wait(lambda: first.began() > began, "the leader gave up and began anew")
    stage.wait(lambda: first.answers("/healthz"), "it waits, and no probe ends it")
    assert not first.ready()
    step = trained.step
    stage.wait(lambda: trained.step > step, "training goes on")
    operator.become(Mode.PASSING)
    stage.wait(operator.one_leads, "one leads again")
    counted_once(stage, operator, before)
    stage.wait(lambda: first.ready() and other.ready(), "both are ready")
    assert first.alive(), "it began anew in the same process"
    assert other.alive()


@pytest.mark.thorough
def test_isolated_leader_is_replaced_without_late_writes(stage: Stage, operator: Pair, trained: Any) -> None:
    """Requests that it sent late have no effect."""
    before, cut = uids(stage), operator.leader
    began = cut.began()
    operator.proxy(cut).become(Mode.SILENT)
    stage.lose("gpt-w1", trained)
    stage.wait(operator.changed, "the standby leads")
    # Before that, by its own clock (leadership/test_elector.py). A machine that stands still shows nothing of it.
    stage.wait(lambda: cut.began() > began, "the other one has given up")
    assert not cut.ready()
    operator.proxy(cut).become(Mode.PASSING)
    counted_once(stage, operator, before)
    stage.wait(cut.ready, "it stands by")
    assert cut.metric("holdfast_leader") == 0


@pytest.mark.thorough
def test_slow_api_server_delays_everything_and_changes_nothing(stage: Stage, operator: Pair, trained: Any) -> None:
    before = uids(stage)
    for one in (operator.leader, operator.standby):
        operator.proxy(one).delay_seconds = 2.0
    stage.lose("gpt-w1", trained)
    counted_once(stage, operator, before)


def test_a_deletion_that_an_expired_watch_did_not_show_is_found(stage: Stage, operator: Pair, trained: Any) -> None:
    before, lost = uids(stage), stage.uid("gpt-w1")
    operator.proxy(operator.leader).deaf = True
    trained.lose(lost)
    stage.core.delete_namespaced_pod("gpt-w1", stage.namespace, grace_period_seconds=0)
    stage.wait(lambda: lost not in uids(stage), "it is gone")
    operator.proxy(operator.leader).expire_watches()
    counted_once(stage, operator, before)


@pytest.mark.thorough
def test_a_clock_that_is_set_loses_nobody_and_hides_nobody(stage: Stage, operator: Pair, trained: Any) -> None:
    before = uids(stage)
    for seconds in (3600, -3600):
        operator.set_clock(seconds)
        stage.wait(lambda off=seconds: noticed(operator, off), "it is noticed")
        step = shown_step(stage)
        stage.wait(lambda last=step: operator.one_leads() and shown_step(stage) > last, "passes go on")
        assert (uids(stage), len(trained.worlds), stage.status().get("incidentCount", 0)) == (before, 1, 0)
    stage.lose("gpt-w1", trained)
    counted_once(stage, operator, before)


def noticed(operator: Pair, seconds: int) -> bool:
    """Whether one of them said that the time of day was set that way; who begins anew finds it set."""
    sign = "-3" if seconds < 0 else "3"
    return operator.one_leads() and f"the time of day was set, it is {sign}" in operator.log()


def shown_step(stage: Stage) -> int:
    return int((stage.status().get("progress") or {}).get("step", 0))
