"""Dropout after a recovery is that of an undisturbed run with the same number of ranks, to the bit.

The script seeds each generator with its slot, so a process in a new slot has other seeds than a lost one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "draws.py"


@pytest.fixture
def draws(launcher: Any) -> Any:
    """A launcher of that script."""
    launcher.script = SCRIPT
    return launcher


def start(launcher: Any, folder: Path, slots: Sequence[int], *arguments: str, attempt: int = 1) -> None:
    """Start these slots as ranks 0, 1, …"""
    launcher.start(0, folder, *arguments)
    launcher.form(attempt, list(slots))


def ended(launcher: Any, slots: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Wait for the end of these slots, and return what each one printed. All have the same weights."""
    for slot in slots:
        assert launcher.processes[slot].wait() == 0, launcher.output()
    told = {slot: launcher.told(slot) for slot in slots}
    assert all(one["weights"] == told[slots[0]]["weights"] for one in told.values())
    return told


def undisturbed(launcher: Any, folder: Path, slots: Sequence[int] = (0, 1, 2)) -> dict[int, dict[str, Any]]:
    start(launcher, folder, slots)
    return ended(launcher, slots)


def lose(launcher: Any, lost: int, others: Sequence[int], *, attempt: int = 1) -> None:
    """Wait for the end of a rank, and end the attempt for the others."""
    launcher.processes.pop(lost).wait()
    launcher.end_attempt(attempt, *others)


def test_standby_in_a_lost_ranks_place_draws_its_numbers(draws: Any, tmp_path: Path) -> None:
    """The lost rank fails after its forward pass."""
    expected = undisturbed(draws, tmp_path / "whole")
    draws.start(3, tmp_path / "cut", "--fail-at", "2", "6")
    draws.stand_by(3)
    draws.wait("the standby process", lambda: bool(draws.of(3, "ready")))
    lose(draws, 2, [0, 1])
    draws.form(2, [0, 1, 3])
    found = ended(draws, [0, 1, 3])
    assert draws.of(3, "restored")[0]["source"] == "memory"
    assert found[1]["weights"] == expected[1]["weights"]
    assert found[1]["losses"] == expected[1]["losses"]


def test_job_without_a_completed_step_starts_with_the_seeds_of_the_new_world(draws: Any, tmp_path: Path) -> None:
    """Rank 0 is lost in the first step. The new rank 0 also provides the weights."""
    expected = undisturbed(draws, tmp_path / "whole", [3, 1, 2])
    draws.start(3, tmp_path / "cut", "--fail-at", "0", "0")
    lose(draws, 0, [1, 2])
    draws.form(2, [3, 1, 2])
    found = ended(draws, [3, 1, 2])
    assert found[1]["weights"] == expected[1]["weights"]
    assert found[1]["losses"] == expected[1]["losses"]


def test_restart_from_a_checkpoint_draws_the_same_numbers(draws: Any, tmp_path: Path) -> None:
    """All processes are new, with other seeds."""
    expected = undisturbed(draws, tmp_path / "whole")
    draws.interval = "6"
    draws.start(3, tmp_path / "cut", "--hold-at", "7")
    draws.wait("a checkpoint", lambda: all(draws.of(slot, "checkpoint") for slot in (0, 1, 2)))
    for process in draws.processes.values():
        process.kill()
        process.wait()
    start(draws, tmp_path / "cut", [3, 4, 5], attempt=2)
    found = ended(draws, [3, 4, 5])
    assert draws.of(3, "restored")[0]["step"] == 6
    assert found[3]["weights"] == expected[0]["weights"]
    assert found[3]["losses"] == expected[0]["losses"][6:]


def test_ranks_that_join_a_shrunk_world_draw_the_numbers_of_the_lost_ones(draws: Any, tmp_path: Path) -> None:
    """The world shrinks to two ranks at step 4, and to one at step 8, which then gets two newcomers."""
    expected = undisturbed(draws, tmp_path / "whole")
    draws.start(3, tmp_path / "cut", "--fail-at", "2", "4", "--fail-at", "1", "8")
    lose(draws, 2, [0, 1])
    draws.form(2, [0, 1])
    lose(draws, 1, [0], attempt=2)
    draws.form(3, [0, 3, 4])
    found = ended(draws, [0, 3, 4])
    for rank, slot in ((1, 3), (2, 4)):
        of_rank = expected[rank]["drawn"]
        assert found[slot]["drawn"] == {name: of_rank[name] for name in list(of_rank)[8:]}
