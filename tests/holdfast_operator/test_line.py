"""Gangs that wait in line: who goes first, what is left to the others, and how often that is worked out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from holdfast_operator.capacity import Ask
from holdfast_operator.line import Known, Line
from holdfast_operator.lines import Lines
from holdfast_operator.occupancy import Occupancy
from holdfast_operator.seen import NodeView, Rival, parse_node

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
POD = {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "1"}}}]}


def node(name: str, cpu: int) -> NodeView:
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": {"cpu": str(cpu), "pods": "110"}, "conditions": conditions}
    return parse_node({"metadata": {"name": name}, "spec": {}, "status": status})


def gang(number: int, pods: int, *, lifted: bool = False, retry_in: float | None = None) -> Rival:
    created = NOW + timedelta(seconds=number)
    retry_at = None if retry_in is None else NOW + timedelta(seconds=retry_in)
    key = f"ml/job-{number}"
    return Rival(
        key=key, uid=key, created=created, since=created, lifted=lifted, pods=pods, pod_spec=POD, retry_at=retry_at
    )


def left_to(line: Line, rival: Rival) -> int:
    return line.before(rival.created, rival.key)[0].place(Ask(pod_spec=POD, count=1000))


def test_each_gang_finds_what_the_older_ones_leave() -> None:
    gangs = [gang(number, pods=3) for number in range(4)]
    line = Line(Known(nodes=(node("n1", 6), node("n2", 4)), rivals=tuple(reversed(gangs))), NOW)
    assert [left_to(line, one) for one in gangs] == [10, 7, 4, 1]
    assert line.before(gangs[3].created, gangs[3].key)[1] == 9
    assert [left_to(line, one) for one in gangs] == [10, 7, 4, 1], "trying something in it changes nothing"


def test_lifted_gangs_go_first_and_one_that_tries_later_or_never_fits_takes_nothing() -> None:
    first, huge = gang(1, pods=2), gang(0, pods=11)
    later, young = gang(2, pods=3, retry_in=5), gang(9, pods=4, lifted=True)
    line = Line(Known(nodes=(node("n1", 10),), rivals=(first, huge, later, young)), NOW)
    assert left_to(line, first) == 6
    assert left_to(line, gang(3, pods=1)) == 4
    assert not line.outlived(NOW + timedelta(seconds=4))
    assert line.outlived(NOW + timedelta(seconds=5))


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=12), st.integers(0, 12))
def test_who_goes_first_is_served_first_whatever_waits(shapes: list[tuple[int, bool]], cpu: int) -> None:
    gangs = [gang(number, pods=pods, lifted=lifted) for number, (pods, lifted) in enumerate(shapes)]
    line = Line(Known(nodes=(node("n1", cpu),), rivals=tuple(gangs)), NOW)
    left = cpu
    for one in sorted(gangs, key=lambda one: (not one.lifted, one.created)):
        if not one.lifted:
            assert left_to(line, one) == left
        if one.lifted or one.pods <= cpu:
            left -= min(left, one.pods)


def known(count: int) -> Known:
    gangs = tuple(gang(number, pods=1) for number in range(count))
    return Known(nodes=(node("n1", 4),), rivals=gangs, jobs=frozenset(one.key for one in gangs))


def test_a_long_line_is_not_made_anew_for_each_pass() -> None:
    reads = []

    def read() -> Known:
        reads.append(1)
        return known(1000)

    lines = Lines(read)
    for pass_ in range(1000):
        assert lines.of(f"ml/job-{pass_}", NOW + timedelta(milliseconds=4 * pass_)) is not None
    assert len(reads) == 1


def test_a_job_that_came_later_is_not_judged_by_an_old_line() -> None:
    counts = iter([100, 101])
    lines = Lines(lambda: known(next(counts)))
    assert lines.of("ml/job-99", NOW) is not None
    assert lines.of("ml/job-100", NOW + timedelta(milliseconds=400)) is None
    assert lines.of("ml/job-100", NOW + timedelta(milliseconds=600)) is not None


def test_the_line_is_kept_while_nothing_changes_and_made_anew_when_a_gang_may_try_again() -> None:
    now = known(2)
    lines = Lines(lambda: now)
    first = lines.of("ml/job-0", NOW)
    assert lines.of("ml/job-0", NOW + timedelta(seconds=60)) is first
    now = replace(now, rivals=(*now.rivals, gang(2, pods=1, retry_in=90)))
    second = lines.of("ml/job-0", NOW + timedelta(seconds=70))
    assert second is not first
    assert lines.of("ml/job-0", NOW + timedelta(seconds=80)) is second
    assert lines.of("ml/job-0", NOW + timedelta(seconds=91)) is not second


def pod(name: str, on: str, cpu: str, phase: str = "Running") -> dict[str, object]:
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


def test_what_did_not_change_on_a_node_is_the_same_object() -> None:
    occupancy = Occupancy()
    occupancy.put("a", pod("a", "n1", "1"))
    before = {usage.node: usage for usage in occupancy.by_node()}
    occupancy.put("b", pod("b", "n2", "1"))
    after = {usage.node: usage for usage in occupancy.by_node()}
    assert after["n1"] is before["n1"]
    assert occupancy.by_node() is occupancy.by_node()
