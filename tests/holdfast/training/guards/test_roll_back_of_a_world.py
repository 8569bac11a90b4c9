"""Real processes over gloo roll back, and one of them is lost before the roll-back is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import PATIENCE, SCRIPTS


@pytest.fixture
def rolling(launcher: Any, tmp_path: Path) -> Any:
    """Two ranks that have decided to roll back and wait for the next world."""
    launcher.script, launcher.interval = SCRIPTS / "rolls_back.py", "2"
    launcher.start(2, tmp_path / "tier", "--hold")
    launcher.go(4)
    launcher.wait("the roll-back", lambda: all(launcher.has_left(slot, 1) for slot in (0, 1)))
    return launcher


def check(launcher: Any) -> list[str]:
    """Check the ends of both ranks. Return what the calls of `job.step` in slot 0 returned."""
    assert launcher.finish() == [0, 0], launcher.output()
    first, second = launcher.told(0), launcher.told(1)
    assert first["weights"] == second["weights"]
    assert first["audit"] == second["audit"]
    assert first["audit"].startswith("exactly once (36 samples")
    assert first["audit"].endswith("8 skipped)")
    reasons: list[str] = first["losses"]
    return reasons


def test_all_ranks_restore_the_same_checkpoint_and_skip_the_same_samples(rolling: Any) -> None:
    (left, other) = (rolling.of(slot, "rolledBack") for slot in (0, 1))
    assert [(told["step"], told["message"]) for told in left] == [(told["step"], told["message"]) for told in other]
    assert "before step 5: the loss on ranks 0, 1 of steps 5 to 6 was not finite" in left[0]["message"]
    assert [told["keep"] for slot in (0, 1) for told in rolling.of(slot, "left")] == [True, True]
    rolling.form(2, [0, 1])
    reasons = check(rolling)
    assert reasons[4:6] == ["5 NonFinite", "4 RolledBack"]
    assert reasons[6:] == [f"{step} Committed" for step in range(5, 10)]
    assert [told["step"] for told in rolling.of(0, "restored")] == [0, 4]


@pytest.mark.parametrize("lost", [0, 1])
def test_roll_back_happens_if_a_rank_is_lost_before_the_next_world(rolling: Any, lost: int) -> None:
    rolling.lose(lost)
    rolling.form(2, [0, 1])
    check(rolling)
    assert [told["step"] for told in rolling.of(lost, "restored")][-1:] == [4]


def test_roll_back_is_repeated_if_a_rank_is_lost_before_the_first_step_after_it(rolling: Any) -> None:
    rolling.path.with_name("go-4").unlink()
    rolling.form(2, [0, 1])
    for slot in (0, 1):
        rolling.wait("the restore", lambda slot=slot: len(rolling.of(slot, "restored")) == 2)
    rolling.lose(1)
    rolling.leave(2, 0)
    rolling.form(3, [0, 1])
    rolling.go(4)
    check(rolling)
    assert [told["step"] for told in rolling.of(0, "restored")] == [0, 4, 4]


def test_rank_whose_weights_alone_are_not_finite_takes_those_of_another(launcher: Any, tmp_path: Path) -> None:
    launcher.script = SCRIPTS / "rolls_back.py"
    launcher.start(2, tmp_path, "--spoil")
    launcher.wait("the rank to leave", lambda: launcher.has_left(1, 1))
    launcher.leave(1, 0)
    launcher.form(2, [0, 1])
    assert launcher.finish() == [0, 0], launcher.output()
    first, second = launcher.told(0), launcher.told(1)
    assert first["weights"] == second["weights"]
    assert next(one for one in first["losses"] if not one.endswith("Committed")) == "5 NonFinite"
    assert second["losses"][4] == "5 RolledBack"
    assert [(told["step"], told["source"]) for told in launcher.of(1, "restored")][1:] == [(5, "memory")]
    assert (len(launcher.of(0, "rolledBack")), len(launcher.of(1, "rolledBack"))) == (0, 1)


def test_launcher_starts_the_next_attempt_with_the_same_processes_and_no_budget(tmp_path: Path) -> None:
    environ = {**os.environ, "HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "tier"), "HOLDFAST_CHECKPOINT_INTERVAL": "2"}
    options = ["--nproc-per-node", "2", "--max-restarts", "0"]
    words = [sys.executable, "-m", "holdfast", "run", *options, str(SCRIPTS / "rolls_back.py")]
    run = subprocess.run(
        words, env=environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    restored = re.findall(r'"5 NonFinite", "(\d) RolledBack"', said)
    assert restored in (["4", "4"], ["2", "2"]), "both processes; the save of step 4 may be running"
    assert '"cause": "NonFinite", "reason": "RolledBack"' in said
