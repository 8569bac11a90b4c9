"""Metadata services in trouble at the true address of a node: what the sidecar makes of each cloud's.

Three nodes are machines of three clouds. Each case is played on all of them at once: a sidecar of its own in the
node's network, with all sources on, asks 169.254.169.254 as it would from a pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from cloud_machines import (
    CLOCK_AHEAD_SECONDS,
    NEAR_SECONDS,
    Document,
    Machine,
    at_once,
)

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.fakes.metadata import AWS, AZURE, CLOUDS, GCP, KINDS, NOTICE_SECONDS, PREEMPTION

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


@pytest.fixture(scope="module")
def machines(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, ...]]:
    """A node for each cloud; all of AWS again afterwards."""
    folder = tmp_path_factory.mktemp("sidecars")
    found = tuple(
        Machine(cluster=cluster, number=number, cloud=cloud, folder=folder) for number, cloud in enumerate(CLOUDS, 1)
    )
    yield found
    for machine in found:
        cluster.clear_notice(machine.number, cloud=AWS)


# In trouble ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What the service does while it has something to announce."""

    name: str
    begin: Callable[[Machine], None]
    at_first: bool = False
    """From before the sidecar starts, which then takes the service for absent."""


def answers(fault: str, *, at_first: bool = False) -> Trouble:
    return Trouble(name=fault, begin=lambda machine: machine.spoil(fault), at_first=at_first)


TROUBLES = (
    answers("401"),
    answers("404", at_first=True),  # of AWS, a 404 to who has a token is how it says that nothing is announced
    answers("429"),
    answers("500"),
    answers("hang"),
    answers("garbage"),
    answers("html"),
    answers("drip"),
    answers("redirect"),
    Trouble(name="unreachable", begin=lambda machine: machine.hide(silent=False)),
    Trouble(name="silent", begin=lambda machine: machine.hide(silent=True), at_first=True),
)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came out of a sidecar."""

    meanwhile: Document | None
    healthy: bool
    failed_polls: Counter[str]
    lines: dict[str, int]
    """How often it was said of each cloud that there is no such service."""
    afterwards: Document = field(default_factory=dict)


def suffer(machine: Machine, trouble: Trouble) -> Seen:
    """An interruption that is announced in the midst of trouble, and told after it."""
    if trouble.at_first:
        trouble.begin(machine)
        machine.announce()
    with machine.sidecar() as sidecar:
        if trouble.at_first:
            sidecar.hears(f"{machine.cloud}: no such service here")
        else:
            sidecar.hears(f"{machine.cloud}: the source of notices answers")
            trouble.begin(machine)
            machine.announce()
            sidecar.hears(f"{machine.cloud}: no notices for now")
        meanwhile, healthy, failed = sidecar.request(), sidecar.healthy(), sidecar.failed_polls()
        machine.mend()
        afterwards = sidecar.asked()
        for other in {*CLOUDS} - {machine.cloud}:
            sidecar.hears(f"{other}: no such service here")
        lines = {cloud: sidecar.says(f"{cloud}: no such service here") for cloud in CLOUDS}
    return Seen(meanwhile=meanwhile, healthy=healthy, failed_polls=failed, lines=lines, afterwards=afterwards)


@pytest.fixture(scope="module", params=TROUBLES, ids=lambda trouble: trouble.name)
def suffered(
    machines: tuple[Machine, ...], request: pytest.FixtureRequest
) -> tuple[Trouble, Mapping[str, Future[Seen]]]:
    trouble: Trouble = request.param
    return trouble, at_once(machines, lambda machine: suffer(machine, trouble))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_metadata_errors_are_no_notice_and_hide_none(
    suffered: tuple[Trouble, Mapping[str, Future[Seen]]], cloud: str
) -> None:
    """Errors of the metadata service are not notices. A notice that arrives during errors is passed on after them."""
    trouble, played = suffered
    seen = played[cloud].result()
    assert seen.meanwhile is None
    assert seen.healthy
    assert seen.failed_polls[cloud] >= 1
    absent = [other for other in CLOUDS if other != cloud or trouble.at_first]
    assert {other: seen.lines[other] for other in absent} == dict.fromkeys(absent, 1)
    assert (seen.afterwards["source"], seen.afterwards["drain"]) == (cloud, True)


def test_expired_token_is_renewed_within_the_poll(machines: tuple[Machine, ...]) -> None:
    (machine,) = (machine for machine in machines if machine.cloud == AWS)

    def expire(machine: Machine) -> tuple[Document, int]:
        with machine.sidecar() as sidecar:
            sidecar.hears(f"{AWS}: the source of notices answers")
            machine.cluster.expire_tokens(machine.number)
            machine.announce()
            return sidecar.asked(), sidecar.says("instance-action answered 401")

    request, refused = at_once((machine,), expire)[AWS].result()
    assert (request["source"], refused) == (AWS, 0)


# What is announced -----------------------------------------------------------------------------------------------

ACTIONS = {
    AWS: {
        "terminate": ("terminate", True),
        "stop": ("stop", True),
        "hibernate": ("hibernate", True),
        "rebalance": ("rebalance", False),
        "instance-stop": ("stop", True),
        "instance-retirement": ("terminate", True),
        "instance-reboot": ("reboot", True),
        "system-reboot": ("reboot", True),
        "system-maintenance": ("maintenance", False),
    },
    GCP: {
        "preempted": ("preempt", True),
        "TERMINATE_ON_HOST_MAINTENANCE": ("terminate", True),
        "MIGRATE_ON_HOST_MAINTENANCE": ("migrate", False),
    },
    AZURE: {
        "Preempt": ("preempt", True),
        "Terminate": ("terminate", True),
        "Redeploy": ("redeploy", True),
        "Reboot": ("reboot", True),
        "Freeze": ("freeze", False),
    },
}
"""What each announcement becomes, and whether the worker leaves."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What a notice became."""

    actions: list[str]
    drain: bool
    statuses: list[str]
    """Of Azure's events, after the launcher had acknowledged the commit."""


def tell(machine: Machine, kind: str) -> Passed:
    """A sidecar that starts on a machine for which something is announced."""
    machine.withdraw()
    machine.announce(kind, NEAR_SECONDS)
    with machine.sidecar() as sidecar:
        request = sidecar.asked()
        statuses: list[str] = []
        if machine.cloud == AZURE:
            sidecar.acknowledge(request)
            sidecar.hears("is approved, its checkpoint is complete")
            statuses = [str(event["EventStatus"]) for event in machine.events()]
        return Passed(actions=sidecar.passed_on(), drain=bool(request["drain"]), statuses=statuses)


@pytest.fixture(scope="module")
def told(machines: tuple[Machine, ...]) -> Mapping[str, Future[dict[str, Passed]]]:
    return at_once(machines, lambda machine: {kind: tell(machine, kind) for kind in KINDS[machine.cloud]})


@pytest.mark.parametrize(("cloud", "kind"), [(cloud, kind) for cloud in CLOUDS for kind in KINDS[cloud]])
def test_each_kind_of_notice_asks_for_what_it_leaves_time_for(
    told: Mapping[str, Future[dict[str, Passed]]], cloud: str, kind: str
) -> None:
    passed = told[cloud].result()[kind]
    action, drain = ACTIONS[cloud][kind]
    assert (passed.actions, passed.drain) == ([action], drain)
    assert passed.statuses == (["Started"] if cloud == AZURE else [])


def test_notice_withdrawn_before_it_is_read_has_no_effect(
    machines: tuple[Machine, ...],
) -> None:
    """A notice that was already passed on stays."""
    later = {AWS: "hibernate", GCP: "MIGRATE_ON_HOST_MAINTENANCE", AZURE: "Reboot"}

    def change_its_mind(machine: Machine) -> tuple[Document | None, Document, list[str]]:
        with machine.sidecar() as sidecar:
            sidecar.hears(f"{machine.cloud}: the source of notices answers")
            machine.spoil("500")
            machine.announce()
            sidecar.hears(f"{machine.cloud}: no notices for now")
            machine.withdraw()
            machine.spoil()
            sidecar.hears(f"{machine.cloud}: the source of notices answers", times=2)
            unheard = sidecar.request()
            machine.announce()
            sidecar.take()
            machine.withdraw()
            machine.announce(later[machine.cloud], 300)
            return unheard, sidecar.asked(), sidecar.passed_on(2)

    for cloud, played in at_once(machines, change_its_mind).items():
        unheard, request, actions = played.result()
        first, second = (ACTIONS[cloud][kind][0] for kind in (PREEMPTION[cloud], later[cloud]))
        assert (unheard, actions) == (None, [first, second])
        assert (request["source"], request.get("supersedes", [])) == (cloud, []), "joined with one that was taken"


def test_a_notice_for_another_machine_is_none(machines: tuple[Machine, ...]) -> None:
    (machine,) = (machine for machine in machines if machine.cloud == AZURE)

    def a_neighbour_goes(machine: Machine) -> tuple[int, list[str], bool]:
        machine.announce("Preempt", resources=("gpt-node_another",))
        with machine.sidecar() as sidecar:
            sidecar.hears(f"{AZURE}: the source of notices answers")
            machine.announce("Reboot")
            request = sidecar.asked()
            return len(machine.events()), sidecar.passed_on(), request["drain"]

    assert at_once((machine,), a_neighbour_goes)[AZURE].result() == (2, ["reboot"], True)


def test_of_two_notices_at_once_an_interruption_stands_alone(machines: tuple[Machine, ...]) -> None:
    lesser = {AWS: "rebalance", GCP: "TERMINATE_ON_HOST_MAINTENANCE", AZURE: "Freeze"}

    def two(machine: Machine) -> list[str]:
        machine.announce(lesser[machine.cloud], NEAR_SECONDS)
        machine.announce()
        with machine.sidecar() as sidecar:
            sidecar.take()
            sidecar.hears(f"{machine.cloud}: the source of notices answers")  # after all that it said was passed on
            return sidecar.passed_on()

    played = at_once(machines, two)
    assert {cloud: one.result() for cloud, one in played.items()} == {
        cloud: [ACTIONS[cloud][PREEMPTION[cloud]][0]] for cloud in CLOUDS
    }


def test_two_disturbances_at_once_are_one_request_naming_both(machines: tuple[Machine, ...]) -> None:
    pairs = {AWS: ("rebalance", "system-maintenance"), AZURE: ("Freeze", "Freeze")}

    def two(machine: Machine) -> tuple[list[str], Document]:
        for kind in pairs[machine.cloud]:
            machine.announce(kind, NEAR_SECONDS)
        with machine.sidecar() as sidecar:
            return sorted(sidecar.passed_on(2)), sidecar.asked()

    some = tuple(machine for machine in machines if machine.cloud in pairs)
    for cloud, played in at_once(some, two).items():
        actions, request = played.result()
        assert actions == sorted(ACTIONS[cloud][kind][0] for kind in pairs[cloud])
        assert (request["drain"], len(request["supersedes"])) == (False, 1)


def test_deadline_uses_the_clock_of_the_host_not_of_the_cloud(machines: tuple[Machine, ...]) -> None:
    def skewed(machine: Machine) -> list[timedelta]:
        """By how much each deadline lies beyond what the cloud gives, from when the notice can have come."""
        beyond = []
        for ahead in CLOCK_AHEAD_SECONDS:
            machine.withdraw()
            machine.spoil(clock_ahead_seconds=ahead)
            began = datetime.now(UTC)
            machine.announce()
            with machine.sidecar() as sidecar:
                deadline = datetime.fromisoformat(sidecar.asked()["deadline"])
            given = timedelta(seconds=NOTICE_SECONDS[machine.cloud])
            late = (datetime.now(UTC) - began) if machine.cloud == GCP else timedelta()  # which names no time
            beyond.append(max(timedelta(), abs(deadline - began - given) - late))
        return beyond

    for cloud, played in at_once(machines, skewed).items():
        assert max(played.result()) < timedelta(seconds=5), cloud
