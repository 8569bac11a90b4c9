"""The end of a job: its last step is durable before it is done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import Numbers, parts, train

Make = Callable[..., Any]


OWN_LOADER = Path(__file__).parent / "scripts" / "own_loader.py"


def test_the_last_step_is_durable_before_done_is_said(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    train(run.job, 7)
    kinds = [kind for kind, _ in run.launcher.told]
    assert kinds.index("restored") < kinds.index("claim") < kinds.index("step")
    assert kinds[-1] == "done"
    assert run.launcher.of("checkpoint")[-1]["step"] == 7
    assert (tmp_path / "step-7.g1.a1" / "MANIFEST.json").exists()


def test_finished_job_that_starts_again_makes_no_step(solo: Make, tmp_path: Path) -> None:
    train(solo(tmp_path).job, 7)
    again = solo(tmp_path)
    assert train(again.job, 7) == []
    assert again.launcher.of("step") == []
    assert again.launcher.of("done") == [{"step": 7}]


@pytest.mark.parametrize("most", [3, 4, 6])
def test_run_resumed_at_or_past_its_end_is_done_at_once(
    solo: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    """The log reports that nothing is left to do."""
    train(solo(tmp_path).job, 4)
    again = solo(tmp_path)
    assert [step for step, _ in train(again.job, most)] == list(range(5, most + 1))
    assert again.launcher.of("done") == [{"step": max(4, most)}]
    assert ("step 4 is past max_steps 3" in caplog.text) == (most == 3)


def test_own_loader_ends_with_a_checkpoint_of_its_last_step(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    made = parts()
    run.job.manage(**made)
    for index in range(3):
        run.job.step(made["model"](Numbers()[index]).square().mean())
    run.job.close()
    assert [kind for kind, _ in run.launcher.told if kind != "phase"][-2:] == ["checkpoint", "done"]
    again = solo(tmp_path)
    again.job.manage(**parts())
    assert again.job.committed_step == 3
    again.job.close()
    assert again.launcher.of("checkpoint") == [], "it made no step, so there is nothing to commit"
    assert again.launcher.of("done") == [{"step": 3}]


def test_a_script_that_manages_nothing_ends_without_a_commit(solo: Make, tmp_path: Path) -> None:
    bare = solo(tmp_path / "bare")
    bare.job.close()
    assert (bare.launcher.of("checkpoint"), bare.launcher.of("done")) == ([], [{"step": 0}])


def test_a_script_that_never_calls_step_ends_without_a_commit(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    made = parts()
    run.job.manage(**made)
    made["model"](torch.ones(1, 2)).sum().backward()
    made["optimizer"].step()
    run.job.close()
    assert (run.launcher.of("checkpoint"), run.launcher.of("done")) == ([], [{"step": 0}])
    assert not list(tmp_path.glob("step-*"))


def test_a_script_that_fails_is_not_done(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    made = parts()
    run.job.manage(**made)
    run.job.step(made["model"](Numbers()[0]).square().mean())
    run.job.close(failed=lambda: True)
    assert ([body["step"] for body in run.launcher.of("checkpoint")], run.launcher.of("done")) == ([1], [])


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "code"), [(("3",), 0), (("3", "loss is negative"), 1)])
def test_process_end_saves_the_last_step_even_on_script_failure(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    environ = {**os.environ, "HOLDFAST_CHECKPOINT_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, str(OWN_LOADER), *words], env=environ, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert len(list(tmp_path.glob("step-3.*/MANIFEST.json"))) == 1
