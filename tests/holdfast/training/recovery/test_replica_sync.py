"""Silent corruption of one replica: it is found, named and repaired from the majority."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rank_launcher import SCRIPTS

from holdfast.training.recovery.replica_sync import ReplicaSync

EQUAL = "all replicas hold the same state after step 4"


@pytest.fixture
def diverging(launcher: Any) -> Any:
    launcher.script = SCRIPTS / "diverge.py"
    return launcher


def test_equal_replicas_report_nothing(diverging: Any, tmp_path: Path) -> None:
    diverging.start(3, tmp_path / "tier")
    assert diverging.finish() == [0, 0, 0], diverging.output()
    assert [diverging.told(slot)["said"] for slot in range(3)] == [[EQUAL, EQUAL]] * 3
    assert not any(diverging.of(slot, "diverged") for slot in range(3))


def test_a_flipped_bit_is_repaired_from_the_majority(diverging: Any, tmp_path: Path) -> None:
    diverging.start(3, tmp_path / "tier", "--flip", "1")
    assert diverging.finish() == [0, 0, 0], diverging.output()
    told = [diverging.told(slot) for slot in range(3)]
    difference = "after step 4, the state of rank 1 differs from other replicas, first in model/weight"
    assert [one["said"] for one in told] == [[difference, EQUAL]] * 3
    assert told[0]["weights"] == told[1]["weights"] == told[2]["weights"]
    assert not diverging.of(0, "diverged"), "the rank that differs reports it to its own launcher"
    (report,) = diverging.of(1, "diverged")
    assert (report["step"], report["ranks"], report["majority"]) == (4, [1], True)


@pytest.mark.parametrize("faults", [("--flip", "1"), ("--flip", "0", "1", "2", "--different")])
def test_without_a_majority_the_script_fails_with_the_ranks(
    diverging: Any, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    size = 2 if len(faults) == 2 else 3
    diverging.start(size, tmp_path / "tier", *faults)
    assert all(diverging.finish()), diverging.output()
    (failure,) = diverging.of(0, "exception")
    assert failure["name"] == "ReplicaError"
    assert f"the state of rank {', '.join(map(str, range(size)))} differs" in failure["message"]
    assert [[report["majority"] for report in diverging.of(slot, "diverged")] for slot in range(size)] == [
        [False],
        *([] for _ in range(1, size)),
    ]


def test_a_script_copies_the_state_of_one_rank(diverging: Any, tmp_path: Path) -> None:
    diverging.start(3, tmp_path / "tier", "--flip", "2", "--source", "2")
    assert diverging.finish() == [0, 0, 0], diverging.output()
    told = [diverging.told(slot) for slot in range(3)]
    assert [one["said"] for one in told] == [[EQUAL, EQUAL]] * 3
    assert told[0]["weights"] == told[1]["weights"] == told[2]["weights"]


def test_a_source_that_is_no_rank_is_refused(diverging: Any, tmp_path: Path) -> None:
    diverging.start(2, tmp_path / "tier", "--source", "2")
    assert all(diverging.finish())
    assert "expected a rank from 0 to 1" in diverging.of(0, "exception")[0]["message"]


def test_ranks_of_other_shards_than_that_of_the_source_keep_their_state() -> None:
    team = Mock(group=Mock(rank=1, size=4))
    team.sharing.side_effect = lambda ranks: [rank for rank in ranks if rank in (1, 3)]
    agent, state, stepper = Mock(), Mock(), Mock()
    ReplicaSync(agent, state, stepper, steps=0).synchronize(team, [1, 2, 3])
    state.load_from_peer.assert_not_called()
    team.group.barrier.assert_called_once()


def test_guards_repair_a_flipped_bit_before_it_has_an_effect(diverging: Any, tmp_path: Path) -> None:
    diverging.interval = "100"
    told = {}
    for name, words in (("undisturbed", ()), ("flipped", ("--flip", "1"))):
        diverging.start(3, tmp_path / name, "--every", "2", *words)
        assert diverging.finish() == [0, 0, 0], diverging.output()
        told[name] = [diverging.told(slot) for slot in range(3)]
        assert len(told[name][0]["losses"]) == 8
    assert told["flipped"] == told["undisturbed"]
    reports = [one for slot in range(3) for one in diverging.of(slot, "diverged")]
    assert [(one["step"], one["ranks"], one["majority"]) for one in reports] == [(4, [1], True)]


@pytest.mark.thorough
def test_guards_fail_a_job_without_a_majority_and_save_no_state_of_it(diverging: Any, tmp_path: Path) -> None:
    diverging.interval = "3"
    diverging.start(2, tmp_path / "tier", "--every", "2", "--flip", "1")
    assert all(diverging.finish()), diverging.output()
    assert {failure["name"] for slot in (0, 1) for failure in diverging.of(slot, "exception")} == {"ReplicaError"}
    assert [path.name for path in sorted((tmp_path / "tier").glob("step-*"))] == ["step-3.g1.a1"]


@pytest.mark.thorough
def test_guards_only_report_replicas_that_never_were_equal(diverging: Any, tmp_path: Path) -> None:
    diverging.interval = "100"
    diverging.start(2, tmp_path / "tier", "--every", "4", "--apart")
    assert diverging.finish() == [0, 0], diverging.output()
    assert [report["step"] for report in diverging.of(0, "diverged")] == [4, 8]
    assert "no comparison found equal replicas" in "".join(diverging.output())


@pytest.mark.parametrize(
    ("period", "step", "saves", "due"),
    [(4, 8, False, True), (4, 9, False, False), (4, 9, True, True), (0, 8, True, False)],
)
@pytest.mark.parametrize(("size", "shards", "replicas"), [(2, None, 2), (1, None, 1), (2, 2, 1), (4, 2, 2)])
def test_the_step_decides_when_several_replicas_are_compared(
    period: int, step: int, *, saves: bool, due: bool, size: int, shards: int | None, replicas: int
) -> None:
    team = Mock(group=Mock(size=size), assignment=None if shards is None else Mock(size=shards))
    sync = ReplicaSync(Mock(), Mock(step=step), Mock(), steps=period)
    assert sync.due(team, saves=saves) is (due and replicas > 1)
