"""Silent corruption of one replica: it is found, named and repaired from the majority."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_launcher import SCRIPTS

EQUAL = "all replicas hold the same state after step 4"


@pytest.fixture
def diverging(launcher: Any) -> Any:
    launcher.script = SCRIPTS / "diverge.py"
    return launcher


def test_equal_replicas_report_nothing(diverging: Any, tmp_path: Path) -> None:
    diverging.start(3, tmp_path / "tier")
    assert diverging.finish() == [0, 0, 0], diverging.output()
    assert [diverging.told(slot)["said"] for slot in range(3)] == [[EQUAL, EQUAL]] * 3
    assert not diverging.of(0, "diverged")


def test_a_flipped_bit_is_repaired_from_the_majority(diverging: Any, tmp_path: Path) -> None:
    diverging.start(3, tmp_path / "tier", "--flip", "1")
    assert diverging.finish() == [0, 0, 0], diverging.output()
    told = [diverging.told(slot) for slot in range(3)]
    difference = "after step 4, the state of rank 1 differs from other replicas, first in model/weight"
    assert [one["said"] for one in told] == [[difference, EQUAL]] * 3
    assert told[0]["weights"] == told[1]["weights"] == told[2]["weights"]
    (report,) = diverging.of(0, "diverged")
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
