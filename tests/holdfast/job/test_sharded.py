"""A model sharded over replicas: a lost shard comes from another replica's memory, and no bit tells that it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"
STEPS = "14"


@pytest.fixture(autouse=True)
def sharded(launcher: Any) -> None:
    launcher.script = SCRIPT


def ended(launcher: Any, *slots: int) -> dict[int, Any]:
    """By shard, the weights at the end: the same on all who have the shard. And the losses of who saw all."""
    for slot in slots:
        assert launcher.processes[slot].wait(120) == 0, launcher.output()
    told = [launcher.told(slot) for slot in slots]
    weights = {one["shard"]: one["weights"] for one in told}
    assert sorted(one["shard"] for one in told) == sorted([0, 1] * (len(slots) // 2))
    assert all(one["weights"] == weights[one["shard"]] for one in told)
    assert all(one["audit"].startswith("exactly once") for one in told)
    return weights


def lost(launcher: Any, attempt: int, dead: int, *others: int) -> None:
    """A rank dies of its fault, and the others leave the attempt."""
    launcher.processes[dead].wait(120)
    launcher.processes.pop(dead)
    gone = [slot for slot in others if launcher.processes[slot].poll() is not None]
    assert not gone, launcher.output()
    launcher.leave(attempt, *others)
    launcher.wait("all to leave", lambda: all(_left(launcher, slot, attempt) for slot in others))


def _left(launcher: Any, slot: int, attempt: int) -> bool:
    return any(message["attempt"] == attempt for message in launcher.of(slot, "left"))


@pytest.fixture
def planned(launcher: Any, tmp_path: Path) -> dict[int, Any]:
    """Three replicas to step 4, and from there, with a commit between, two."""
    launcher.start(6, tmp_path / "planned", "--steps", "4")
    ended(launcher, *range(6))
    launcher.start(4, tmp_path / "planned", "--steps", STEPS, attempt=2)
    return ended(launcher, 0, 1, 2, 3)


@pytest.fixture
def undisturbed(launcher: Any, tmp_path: Path) -> dict[int, Any]:
    launcher.start(4, tmp_path / "quiet", "--steps", STEPS)
    return ended(launcher, 0, 1, 2, 3)


def test_kills_at_every_point_of_a_step_leave_the_bits_of_an_undisturbed_run(
    launcher: Any, tmp_path: Path, undisturbed: dict[int, Any]
) -> None:
    faults = "forward:3:2,backward:0:5,vote:2:8,optimizer:1:11"
    launcher.start(4, tmp_path / "tier", "--steps", STEPS, "--faults", faults)
    lost(launcher, 1, 3, 0, 1, 2)
    launcher.form(2, [0, 1, 2, 4])
    lost(launcher, 2, 0, 1, 2, 4)
    launcher.form(3, [5, 1, 2, 4])
    lost(launcher, 3, 2, 5, 1, 4)
    launcher.form(4, [5, 1, 6, 4])
    lost(launcher, 4, 1, 5, 6, 4)
    launcher.form(5, [5, 7, 6, 4])
    assert ended(launcher, 4, 5, 6, 7) == undisturbed
    restored = [launcher.of(slot, "restored")[0] for slot in (4, 5, 6, 7)]
    assert [message["source"] for message in restored] == ["memory"] * 4
    assert [message["step"] for message in restored] == [2, 5, 9, 12] or restored[2]["step"] == 8


def test_orphans_of_two_replicas_of_three_go_on_as_one_with_the_bits_of_a_planned_run(
    launcher: Any, tmp_path: Path, planned: dict[int, Any]
) -> None:
    launcher.start(6, tmp_path / "tier", "--steps", STEPS, "--faults", "forward:1:4,forward:2:4")
    launcher.processes[2].wait(120)
    del launcher.processes[2]
    lost(launcher, 1, 1, 0, 3, 4, 5)
    launcher.form(2, [5, 0, 4, 3])
    assert ended(launcher, 0, 3, 4, 5) == planned
    assert [launcher.of(slot, "restored")[-1]["source"] for slot in (0, 3, 4, 5)] == ["memory"] * 4
