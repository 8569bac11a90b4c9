"""If the storage fails, training continues, and each request is answered when the storage is back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_training import Numbers, outcomes, parts, steps, told_of

from holdfast.training.checkpointing import scheduler
from holdfast.training.launcher_client.connection import Requests

Make = Callable[..., Any]


def spoil(root: Path) -> None:
    """Put a file in place of the folder, so that every save fails."""
    root.rename(root.with_name("away"))
    root.write_text("")


def mend(root: Path) -> None:
    """Restore the folder."""
    root.unlink()
    root.with_name("away").rename(root)


def at_the_fifth_failure(monkeypatch: pytest.MonkeyPatch, then: Callable[[], float]) -> None:
    """Retry at once, except after the fifth failure. Then, `then` returns the seconds to wait."""
    monkeypatch.setattr(scheduler, "retry_after", lambda failed: then() if failed == 5 else 0.0)


def test_storage_outage_is_reported_and_costs_no_steps(
    solo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is healthy otherwise, and continues."""
    monkeypatch.setattr(scheduler, "retry_after", lambda failed: 0.0)
    root = tmp_path / "tier"
    run = solo(root, interval="2")
    made = parts()
    run.job.manage(**made)
    for step in steps(run.job, made, 20):
        if step in (3, 11):
            run.settle()
            (spoil if step == 3 else mend)(root)
    assert outcomes(run)[0] == (2, "Committed")
    assert outcomes(run)[-1] == (20, "Committed")
    failed = [body for body in run.launcher.of("checkpoint") if body["result"] == "Failed"]
    assert len(failed) > 3
    assert all(body["cause"] == "Gone" and body["message"] and 4 <= body["step"] <= 11 for body in failed)
    assert (12, "Committed") in outcomes(run), "the first one that can be written is, interval or not"
    assert run.launcher.of("done") == [{"step": 20}]


def test_failed_checkpoint_is_retried_before_the_next_is_due(solo: Make, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    run = solo(root, interval="1000")
    made = parts()
    run.job.manage(**made)
    for step in steps(run.job, made, 5):
        if step == 2:
            spoil(root)
            assert not run.job.save()
            mend(root)
    assert outcomes(run) == [(2, "Failed"), (3, "Committed"), (5, "Committed")]


def test_the_last_step_waits_for_its_storage(solo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = solo(tmp_path / "tier")
    made = parts()
    run.job.manage(**made)
    spoil(tmp_path / "tier")
    at_the_fifth_failure(monkeypatch, lambda: mend(tmp_path / "tier") or 0.0)
    assert list(steps(run.job, made, 2)) == [1, 2]
    assert outcomes(run) == [(2, "Failed")] * 5 + [(2, "Committed")]
    assert run.launcher.of("done") == [{"step": 2}]


def test_the_end_of_the_attempt_ends_the_wait_for_storage(
    solo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = solo(tmp_path / "tier")
    made = parts()
    run.job.manage(**made)
    spoil(tmp_path / "tier")
    at_the_fifth_failure(monkeypatch, lambda: run.launcher.lose_peers("a peer is lost") or 3600.0)
    with pytest.raises(BaseException) as ended:  # noqa: PT011  (the recorder's own)
        list(steps(run.job, made, 2))
    assert type(ended.value).__name__ == "TheEnd"
    assert (run.job.committed_step, run.launcher.of("done")) == (2, [])


def test_request_unanswered_by_a_failed_save_is_answered_later(solo: Make, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    run = solo(root)
    made = parts()
    run.job.manage(**made)
    for batch in run.job.batches(Numbers(), global_batch_size=4, micro_batch_size=4, max_steps=6):
        result = run.job.step(made["model"](batch).square().mean())
        if result.step == 1:
            spoil(root)
            run.launcher.wanted = Requests(checkpoint=("touch",))
        if result.step == 2:
            told_of(run, "touch")
            mend(root)
    told = [(body["step"], body["result"]) for body in run.launcher.of("checkpoint") if "touch" in body["ids"]]
    assert told == [(2, "Failed"), (3, "Committed")]


def test_new_request_does_not_wait_for_the_next_retry(
    solo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "retry_after", lambda failed: 3600.0)
    root = tmp_path / "tier"
    run = solo(root)
    made = parts()
    run.job.manage(**made)
    for step in steps(run.job, made, 20):
        if step == 1:
            spoil(root)
            run.launcher.wanted = Requests(checkpoint=("first",))
        if step == 2:
            told_of(run, "first")
        if step == 10:
            mend(root)
            run.launcher.wanted = Requests(checkpoint=("first", "second"))
        if step == 11:
            told_of(run, "second")
            break
    told = [(body["step"], body["result"], body["ids"]) for body in run.launcher.of("checkpoint")]
    assert told == [(2, "Failed", ["first"]), (11, "Committed", ["first", "second"])]
