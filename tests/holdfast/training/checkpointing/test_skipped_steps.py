"""The checkpoints of a row of skipped steps delete none from before the row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from small_training import Numbers, parts
from solo_job import Solo

from holdfast import Guards

Make = Callable[..., Solo]


def test_saves_of_the_script_in_a_row_leave_the_checkpoint_for_the_roll_back(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="2", keep_last=2, guards=Guards(roll_back_after=6))
    run.launcher.moves_on = True
    made = parts()
    run.job.manage(**made)
    bad = {*range(6, 12)}
    reasons = []
    for batch in run.job.batches(Numbers(), global_batch_size=4, micro_batch_size=4, max_steps=14):
        step = run.job.committed_step + 1
        factor = float("nan") if step in bad else 1.0
        bad.discard(step)
        result = run.job.step(made["model"](batch).square().mean() * factor)
        reasons.append(result.reason)
        if result.reason == "NonFinite":
            assert run.job.save()
    assert reasons[5:11] == ["NonFinite"] * 5 + ["RolledBack"]
    assert [body["step"] for body in run.launcher.of("restored")] == [0, 4]
