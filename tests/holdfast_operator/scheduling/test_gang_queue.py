"""Gangs that wait in line: who goes first, what is left to the others, and how often that is worked out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast_operator.cluster.node_usage import Occupancy
from holdfast_operator.scheduling.capacity import FreeCapacity, PodRequest
from holdfast_operator.scheduling.gang_queue import GangQueue, GangQueueInput, standing_of
from holdfast_operator.scheduling.gang_queue_cache import GangQueueCache
from holdfast_operator.scheduling.waiting_gang import GangPriority, WaitingGang
from holdfast_operator.views import NodeUsage, NodeView, PodAffinityInfo, parse_node, parse_pod

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
POD = {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "1"}}}]}


def node(name: str, cpu: int) -> NodeView:
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": {"cpu": str(cpu), "pods": "110"}, "conditions": conditions}
    return parse_node({"metadata": {"name": name}, "spec": {}, "status": status})


def gang(
    number: int,
    pods: int,
    *,
    lifted: bool = False,
    retry_in: float | None = None,
    priority: int = 0,
    preempts: bool = True,
) -> WaitingGang:
    created = NOW + timedelta(seconds=number)
    key = f"ml/job-{number}"
    return WaitingGang(
        key=key,
        uid=key,
        created=created,
        since=created,
        lifted=lifted,
        pods=pods,
        pod_spec=POD,
        retry_at=None if retry_in is None else NOW + timedelta(seconds=retry_in),
        standing=GangPriority(priority=priority, preempts=preempts),
    )


def rooms(line: GangQueue, rival: WaitingGang) -> list[FreeCapacity]:
    return list(line.before(rival.standing, rival.created, rival.key)[0])


def taken(on: str, cpu: int, priority: int) -> NodeUsage:
    return NodeUsage(
        node=on, amounts={"cpu": Decimal(cpu)}, tenants=(PodAffinityInfo(namespace="ml"),), priority=priority
    )


def left_to(line: GangQueue, rival: WaitingGang) -> int:
    return rooms(line, rival)[0].place(PodRequest(pod_spec=POD, count=1000))


def may_have(line: GangQueue, rival: WaitingGang) -> int:
    """At most, if need be in the place of others."""
    return rooms(line, rival)[-1].place(PodRequest(pod_spec=POD, count=1000))


def test_each_gang_finds_what_the_older_ones_leave() -> None:
    gangs = [gang(number, pods=3) for number in range(4)]
    line = GangQueue(GangQueueInput(nodes=(node("n1", 6), node("n2", 4)), rivals=tuple(reversed(gangs))), NOW)
    assert [left_to(line, one) for one in gangs] == [10, 7, 4, 1]
    assert line.before(gangs[3].standing, gangs[3].created, gangs[3].key)[1] == 9
    assert [left_to(line, one) for one in gangs] == [10, 7, 4, 1], "trying something in it changes nothing"


def test_lifted_gangs_go_first() -> None:
    """A gang in back-off, or one that never fits, reserves nothing."""
    first, huge = gang(1, pods=2), gang(0, pods=11)
    later, young = gang(2, pods=3, retry_in=5), gang(9, pods=4, lifted=True)
    line = GangQueue(GangQueueInput(nodes=(node("n1", 10),), rivals=(first, huge, later, young)), NOW)
    assert left_to(line, first) == 6
    assert left_to(line, gang(3, pods=1)) == 4
    assert not line.outlived(NOW + timedelta(seconds=4))
    assert line.outlived(NOW + timedelta(seconds=5))


def test_gang_may_start_with_the_minimum_it_needs() -> None:
    """An empty cluster must hold that many."""
    usage = (taken("n1", 4, priority=0),)
    line = GangQueue(GangQueueInput(nodes=(node("n1", 4), node("n2", 4)), usage=usage), NOW)
    gangs = [replace(gang(most, pods=most), least=least) for most, least in ((8, 0), (9, 0), (10, 8), (20, 9))]
    assert [line.could_begin(one) for one in gangs] == [True, False, True, False]


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=12), st.integers(0, 12))
def test_who_goes_first_is_served_first_whatever_waits(shapes: list[tuple[int, bool]], cpu: int) -> None:
    gangs = [gang(number, pods=pods, lifted=lifted) for number, (pods, lifted) in enumerate(shapes)]
    line = GangQueue(GangQueueInput(nodes=(node("n1", cpu),), rivals=tuple(gangs)), NOW)
    left = cpu
    for one in sorted(gangs, key=lambda one: (not one.lifted, one.created)):
        if not one.lifted:
            assert left_to(line, one) == left
        if one.lifted or one.pods <= cpu:
            left -= min(left, one.pods)


def test_queue_is_ordered_by_priority_then_age() -> None:
    old, young, urgent = gang(0, pods=2), gang(1, pods=3), gang(2, pods=4, priority=10)
    lifted = gang(3, pods=1, lifted=True, priority=-5)
    line = GangQueue(GangQueueInput(nodes=(node("n1", 20),), rivals=(old, young, urgent, lifted)), NOW)
    assert [left_to(line, one) for one in (urgent, old, young)] == [19, 15, 13]


def test_only_lower_priorities_count_as_free() -> None:
    usage = (taken("n1", 4, priority=0), taken("n2", 4, priority=10))
    line = GangQueue(GangQueueInput(nodes=(node("n1", 4), node("n2", 4)), usage=usage), NOW)
    assert [may_have(line, gang(0, pods=1, priority=p)) for p in (-1, 0, 5, 10, 11)] == [0, 0, 4, 4, 8]
    assert len(rooms(line, gang(0, pods=1, priority=0))) == 1, "nobody to displace"
    assert may_have(line, gang(0, pods=1, priority=11, preempts=False)) == 0


def test_displaced_capacity_is_not_left_to_later_gangs() -> None:
    usage = (taken("n1", 4, priority=0), taken("n2", 4, priority=0))
    first, second = gang(2, pods=4, priority=10), gang(3, pods=2, priority=5)
    behind = gang(0, pods=1)
    line = GangQueue(
        GangQueueInput(nodes=(node("n1", 4), node("n2", 4)), usage=usage, rivals=(behind, second, first)), NOW
    )
    assert [may_have(line, one) for one in (first, second, behind)] == [8, 4, 0]
    assert line.before(behind.standing, behind.created, behind.key)[1] == 6


def test_victims_of_a_lifted_gang_count_once() -> None:
    usage = (taken("n1", 4, priority=0),)
    lifted, urgent = gang(0, pods=4, lifted=True, priority=5), gang(1, pods=4, priority=10)
    line = GangQueue(GangQueueInput(nodes=(node("n1", 4),), usage=usage, rivals=(urgent, lifted)), NOW)
    assert may_have(line, urgent) == 0


def test_gang_with_free_capacity_displaces_no_pod() -> None:
    usage = (taken("n1", 4, priority=0),)
    urgent, behind = gang(1, pods=4, priority=10), gang(0, pods=4)
    line = GangQueue(
        GangQueueInput(nodes=(node("n1", 4), node("n2", 4), node("n3", 4)), usage=usage, rivals=(urgent, behind)), NOW
    )
    assert left_to(line, behind) == 4


def test_who_has_to_displace_some_takes_first_what_is_free() -> None:
    usage = (taken("n1", 4, priority=0), taken("n2", 4, priority=0))
    urgent, behind = gang(1, pods=8, priority=10), gang(0, pods=1)
    line = GangQueue(
        GangQueueInput(nodes=(node("n1", 4), node("n2", 4), node("n3", 4)), usage=usage, rivals=(urgent, behind)), NOW
    )
    assert left_to(line, behind) == 0


def test_of_pods_of_two_priorities_the_least_counts() -> None:
    views = [parse_pod({"spec": {"priority": priority}}) for priority in (7, 3)]
    assert standing_of(views) == GangPriority(priority=3)
    never = parse_pod({"spec": {"preemptionPolicy": "Never"}})
    assert standing_of([*views, never]) == GangPriority(priority=0, preempts=False)
    assert standing_of([]) is None


RIVALS = st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(-1, 2), st.booleans()), max_size=8)
TAKEN = st.lists(st.tuples(st.sampled_from(["n1", "n2"]), st.integers(1, 3), st.integers(-1, 2)), max_size=6)


def a_line(
    shapes: list[tuple[int, bool, int, bool]], usage: list[tuple[str, int, int]]
) -> tuple[GangQueue, list[WaitingGang]]:
    gangs = [
        gang(number, pods=pods, lifted=lifted, priority=priority, preempts=preempts)
        for number, (pods, lifted, priority, preempts) in enumerate(shapes)
    ]
    used = tuple(taken(on, cpu, priority) for on, cpu, priority in usage)
    nodes = tuple(node(name, 9) for name in ("n1", "n2"))
    return GangQueue(GangQueueInput(nodes=nodes, usage=used, rivals=tuple(gangs)), NOW), gangs


@given(RIVALS, TAKEN, st.integers(-1, 3), st.booleans())
def test_gang_displaces_only_lower_priorities(
    shapes: list[tuple[int, bool, int, bool]], usage: list[tuple[str, int, int]], priority: int, preempts: bool
) -> None:
    line, _ = a_line(shapes, usage)
    for room in rooms(line, gang(99, pods=1, priority=priority, preempts=preempts)):
        before = room.copy()
        room.place(PodRequest(pod_spec=POD, count=1000))
        for put in room.beyond(before):
            stay = [cpu for on, cpu, other in usage if on == put.node and (other >= priority or not preempts)]
            assert put.amounts["cpu"] + sum(stay) <= max(9, sum(stay))


@given(RIVALS, TAKEN, st.randoms())
def test_each_gang_has_one_place_in_the_queue(
    shapes: list[tuple[int, bool, int, bool]], usage: list[tuple[str, int, int]], random: Random
) -> None:
    """The order of the list does not matter."""
    line, gangs = a_line(shapes, usage)
    waiting = [one for one in gangs if not one.lifted]
    shuffled = random.sample(gangs, len(gangs))
    used = tuple(taken(on, cpu, priority) for on, cpu, priority in usage)
    other = GangQueue(GangQueueInput(nodes=(node("n1", 9), node("n2", 9)), usage=used, rivals=tuple(shuffled)), NOW)
    assert [may_have(line, one) for one in waiting] == [may_have(other, one) for one in waiting]


@given(RIVALS, TAKEN)
def test_what_a_gang_may_have_hangs_on_no_gang_behind_it(
    shapes: list[tuple[int, bool, int, bool]], usage: list[tuple[str, int, int]]
) -> None:
    line, gangs = a_line(shapes, usage)
    used = tuple(taken(on, cpu, priority) for on, cpu, priority in usage)
    for one in gangs:
        ahead = [
            other
            for other in gangs
            if other.lifted or (-other.standing.priority, other.created) < (-one.standing.priority, one.created)
        ]
        short = GangQueue(GangQueueInput(nodes=(node("n1", 9), node("n2", 9)), usage=used, rivals=tuple(ahead)), NOW)
        assert one.lifted or may_have(short, one) == may_have(line, one)


def known(count: int) -> GangQueueInput:
    gangs = tuple(gang(number, pods=1) for number in range(count))
    return GangQueueInput(nodes=(node("n1", 4),), rivals=gangs, jobs=frozenset(one.key for one in gangs))


def test_a_long_line_is_not_made_anew_for_each_pass() -> None:
    reads = []

    def read() -> GangQueueInput:
        reads.append(1)
        return known(1000)

    lines = GangQueueCache(read)
    for pass_ in range(1000):
        assert lines.of(f"ml/job-{pass_}", NOW + timedelta(milliseconds=4 * pass_)) is not None
    assert len(reads) == 1


def test_a_job_that_came_later_is_not_judged_by_an_old_line() -> None:
    counts = iter([100, 101])
    lines = GangQueueCache(lambda: known(next(counts)))
    assert lines.of("ml/job-99", NOW) is not None
    assert lines.of("ml/job-100", NOW + timedelta(milliseconds=400)) is None
    assert lines.of("ml/job-100", NOW + timedelta(milliseconds=600)) is not None


def test_queue_is_recomputed_when_a_gang_may_retry() -> None:
    """It is kept while nothing changes."""
    now = known(2)
    lines = GangQueueCache(lambda: now)
    first = lines.of("ml/job-0", NOW)
    assert lines.of("ml/job-0", NOW + timedelta(seconds=60)) is first
    now = replace(now, rivals=(*now.rivals, gang(2, pods=1, retry_in=90)))
    second = lines.of("ml/job-0", NOW + timedelta(seconds=70))
    assert second is not first
    assert lines.of("ml/job-0", NOW + timedelta(seconds=80)) is second
    assert lines.of("ml/job-0", NOW + timedelta(seconds=91)) is not second


def pod(name: str, on: str, cpu: str, phase: str = "Running") -> dict[str, Any]:
    resources = {"requests": {"cpu": cpu}}
    spec = {"nodeName": on, "containers": [{"name": "trainer", "resources": resources}]}
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": spec, "status": {"phase": phase}}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["n1", "n2"]), st.integers(0, 3))))
def test_what_pods_take_is_the_sum_of_those_that_are_there(changes: list[tuple[str, str, int]]) -> None:
    occupancy, there = Occupancy(), dict[str, tuple[str, int]]()
    for uid, on, cpu in changes:
        if cpu:
            occupancy.put(uid, pod(uid, on, str(cpu)))
            there[uid] = (on, cpu)
        else:
            occupancy.put(uid, pod(uid, on, "1", phase="Failed"))
            there.pop(uid, None)
        sums = {usage.node: (usage.amounts["cpu"], len(usage.tenants)) for usage in occupancy.by_node()}
        wanted = {name: [cpu for on, cpu in there.values() if on == name] for name in ("n1", "n2")}
        assert sums == {name: (Decimal(sum(cpus)), len(cpus)) for name, cpus in wanted.items() if cpus}


def test_what_pods_of_each_priority_take_is_told_apart() -> None:
    occupancy = Occupancy()
    for name, priority in (("a", None), ("b", 5), ("c", 5)):
        body = pod(name, "n1", "1")
        if priority is not None:
            body["spec"]["priority"] = priority
        occupancy.put(name, body)
    assert [(one.priority, one.amounts["cpu"], len(one.tenants)) for one in occupancy.by_node()] == [
        (0, Decimal(1), 1),
        (5, Decimal(2), 2),
    ]


def test_what_did_not_change_on_a_node_is_the_same_object() -> None:
    occupancy = Occupancy()
    occupancy.put("a", pod("a", "n1", "1"))
    before = {usage.node: usage for usage in occupancy.by_node()}
    occupancy.put("b", pod("b", "n2", "1"))
    after = {usage.node: usage for usage in occupancy.by_node()}
    assert after["n1"] is before["n1"]
    assert occupancy.by_node() is occupancy.by_node()
