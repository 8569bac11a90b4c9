"""The injector in a rank runs each due fault once on the right rank, and every step leaves a mark in the trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.core.environment import read_environment
from holdfast.core.errors import ChaosError
from holdfast.fault_injection import injector
from holdfast.fault_injection.injector import Injector, before_read, listener, order_file
from holdfast.fault_injection.plan import Fault, Kind
from holdfast.fault_injection.step_trace import JsonLines, Trace
from holdfast.telemetry.activity import Activity, Meter

Make = Callable[..., Meter]


@pytest.fixture
def meter(tmp_path: Path) -> Make:
    """The meter of a rank under a `holdfast chaos` with these faults."""

    def make(*faults: Fault, rank: int = 0) -> Meter:
        (tmp_path / "plan.json").write_text(json.dumps([fault.to_json() for fault in faults]))
        return Meter(Injector(tmp_path, lambda: (rank, 2)))

    return make


def steps(meter: Meter, *numbers: int) -> None:
    """Run the activities of the loop for these steps."""
    for number in numbers:
        for activity in (Activity.DATA, Activity.COMPUTE, Activity.AVERAGE, Activity.VOTE, Activity.APPLY):
            meter.enter(activity, number - 1)
    meter.enter(Activity.DATA, numbers[-1])


RAISE = Fault(number=1, kind=Kind.EXCEPTION, rank=0, step=3)


def test_process_without_chaos_has_no_listener() -> None:
    assert listener(read_environment({})) is None


def test_a_process_under_chaos_finds_its_plan(tmp_path: Path, meter: Make) -> None:
    meter(RAISE)
    assert listener(read_environment({"HOLDFAST_CHAOS": str(tmp_path)})) is not None


def test_every_step_leaves_a_mark(meter: Make, tmp_path: Path) -> None:
    steps(meter(), 1, 2, 3)
    trace = Trace(tmp_path / "trace")
    trace.read()
    assert [(mark.step, mark.rank, mark.size) for mark in trace.records] == [(1, 0, 2), (2, 0, 2), (3, 0, 2)]
    assert all(mark.began <= mark.time for mark in trace.records)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which the injector has slept. It sleeps for no time."""
    seconds: list[float] = []
    monkeypatch.setattr(injector, "time", SimpleNamespace(sleep=seconds.append))  # other threads sleep too
    return seconds


def test_sharded_model_waiting_for_its_group_repeats_no_step(meter: Make, slept: list[float], tmp_path: Path) -> None:
    waits = meter(replace(RAISE, kind=Kind.SLOW, step=1, steps=2, seconds=0.2))
    waits.enter(Activity.COMPUTE, 0)
    for _ in range(50):
        with waits.during(Activity.AVERAGE):
            pass
    assert slept == [0.2], "the second slow step is the next one"
    steps(waits, 1)
    trace = Trace(tmp_path / "trace")
    trace.read()
    assert [mark.step for mark in trace.records] == [1]


@pytest.mark.parametrize("how", [Activity.RESTORE, Activity.SYNC])
def test_a_state_that_was_given_is_no_step_that_was_made(meter: Make, tmp_path: Path, how: Activity) -> None:
    newcomer = meter()
    newcomer.enter(how, 0)
    steps(newcomer, 51)
    trace = Trace(tmp_path / "trace")
    trace.read()
    assert [mark.step for mark in trace.records] == [51]


def test_an_exception_comes_at_its_step_and_once(meter: Make, tmp_path: Path) -> None:
    first = meter(RAISE)
    steps(first, 1, 2)
    with pytest.raises(ChaosError, match="step 3"):
        steps(first, 3)
    steps(meter(RAISE), 3, 4)  # the one that replaces it
    assert [line["kind"] for line in JsonLines(tmp_path / "injections").read_new()] == ["exception"]


def test_other_ranks_are_left_alone(meter: Make, tmp_path: Path) -> None:
    steps(meter(RAISE, rank=1), 1, 2, 3, 4)
    assert list(JsonLines(tmp_path / "injections").read_new()) == []


@pytest.mark.parametrize("kind", [Kind.EXCEPTION, Kind.SLEEP])
def test_an_order_is_obeyed_once(meter: Make, tmp_path: Path, kind: Kind) -> None:
    ordered = meter()
    order_file(tmp_path, os.getpid()).write_text(json.dumps(replace(RAISE, kind=kind, seconds=0.01).to_json()))
    if kind is Kind.EXCEPTION:
        with pytest.raises(ChaosError):
            steps(ordered, 1)
    steps(ordered, 1, 2)
    assert [line["kind"] for line in JsonLines(tmp_path / "injections").read_new()] == [str(kind)]


def test_a_slow_rank_is_slow_for_its_steps_only(meter: Make, slept: list[float]) -> None:
    steps(meter(Fault(number=1, kind=Kind.SLOW, rank=0, step=2, seconds=0.5, steps=2)), 1, 2, 3, 4, 5)
    assert slept == [0.5, 0.5]


def test_next_sample_of_a_rank_is_bad_from_then_on(meter: Make, tmp_path: Path) -> None:
    meter(Fault(number=1, kind=Kind.BAD_SAMPLE, rank=0, step=2, at=Activity.DATA))  # writes the plan
    reads = Injector(tmp_path, lambda: (0, 2))
    victim, read = Meter(reads), before_read([reads])
    victim.enter(Activity.DATA, 0)
    read(7)
    victim.enter(Activity.DATA, 1)
    for sample, bad in ((5, True), (7, False), (5, True)):
        with pytest.raises(ChaosError, match="sample 5 cannot be read") if bad else nullcontext():
            read(sample)
    assert [line["kind"] for line in JsonLines(tmp_path / "injections").read_new()] == ["bad-sample"]


def test_a_killed_rank_has_said_so_before(tmp_path: Path) -> None:
    fault = Fault(number=1, kind=Kind.KILL, rank=0, step=2, at=Activity.VOTE)
    (tmp_path / "plan.json").write_text(json.dumps([fault.to_json()]))
    program = (
        "import pathlib, sys; from holdfast.fault_injection.injector import Injector\n"
        "from holdfast.telemetry.activity import Activity\n"
        "one = Injector(pathlib.Path(sys.argv[1]), lambda: (0, 1))\n"
        "for a in (Activity.COMPUTE, Activity.AVERAGE, Activity.VOTE): one.entered(a, 1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=240)
    assert ended.returncode == -signal.SIGKILL
    assert [(line["kind"], line["step"]) for line in JsonLines(tmp_path / "injections").read_new()] == [("kill", 1)]
