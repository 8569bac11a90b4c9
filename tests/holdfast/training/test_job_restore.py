"""A job that starts again: what it restores, what it refuses, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import Numbers, parts, told_of, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast import DataError
from holdfast.checkpoint.folder.claims import write_claim
from holdfast.core.attempt import AttemptId, Claim
from holdfast.training.options.elasticity import Elasticity
from holdfast.training.step import train_state

Make = Callable[..., Any]


def test_a_run_that_was_cut_goes_on_to_the_bit(solo: Make, tmp_path: Path) -> None:
    """Dropout uses the generator of torch, so the test needs the state of the generators too."""
    expected = train(solo(tmp_path / "whole", interval="4").job, 20)
    cut = solo(tmp_path / "cut", interval="4")
    train(cut.job, 20, stop_at=10)
    told_of(cut, "interval", step=8)
    torch.manual_seed(999)
    again = solo(tmp_path / "cut", interval="4")
    assert train(again.job, 20) == expected[8:]
    assert again.launcher.of("restored")[0]["step"] == 8
    assert again.job.audit().ok
    assert again.job.audit().seen.count == 100


def test_script_settings_replaced_by_a_checkpoint_are_named(
    solo: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(solo(tmp_path, interval="1").job, 20, stop_at=2)
    assert "settings" not in caplog.text
    longer = parts()
    longer["scheduler"].T_max = 40
    solo(tmp_path).job.manage(**longer)
    assert "scheduler: T_max is 20 in the checkpoint and 40 in the script" in caplog.text


@pytest.mark.parametrize("deterministic", [True, False])
def test_other_versions_than_those_of_the_checkpoint_are_named(
    solo: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    train(solo(tmp_path, interval="1").job, 20, stop_at=2)
    saved = train_state.numerics()
    assert "numeric settings" not in caplog.text
    monkeypatch.setattr(
        train_state, "numerics", lambda: saved | {"torch": "9.9", "driver": "570", "deterministic": deterministic}
    )
    solo(tmp_path).job.manage(**parts())
    assert "numeric settings differ from those of the checkpoint: " in caplog.text
    assert f"torch was {saved['torch']}, is 9.9; " in caplog.text
    assert "driver was absent, is 570. Results may differ in their last bits" in caplog.text
    assert ("although deterministic is set" in caplog.text) == deterministic


class Tokens:
    """A counter of the script."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_repeatedly_interrupted_run_has_undisturbed_rates(solo: Make, tmp_path: Path) -> None:
    """MultiStepLR keeps its milestones in a Counter, and reads it at each milestone."""

    def made(folder: Path, stop_at: int) -> list[tuple[int, float, float, int]]:
        job = solo(folder, interval="1").job
        one, tokens = parts(), Tokens()
        warmup = torch.optim.lr_scheduler.LinearLR(one["optimizer"], 0.1, total_iters=3)
        steps = torch.optim.lr_scheduler.MultiStepLR(one["optimizer"], [4, 8])
        one["scheduler"] = torch.optim.lr_scheduler.SequentialLR(one["optimizer"], [warmup, steps], [3])
        job.manage(**one, tokens=tokens)
        seen = []
        for batch in job.batches(Numbers(), global_batch_size=5, micro_batch_size=5, max_steps=20, seed=3):
            tokens.seen += len(batch)
            result = job.step((one["model"](batch) - 1).square().mean())
            seen.append((result.step, result.loss, one["optimizer"].param_groups[0]["lr"], tokens.seen))
            if result.step == stop_at:
                break
        return seen

    undisturbed = made(tmp_path / "whole", 20)
    assert [one[0] for one in undisturbed] == list(range(1, 21))
    cut = [line for stop in (5, 9, 14, 20) for line in made(tmp_path / "cut", stop)]
    assert {line[0]: line for line in cut} == {line[0]: line for line in undisturbed}


def test_averaged_weights_equal_those_of_an_undisturbed_run(solo: Make, tmp_path: Path) -> None:
    """The optimizer updates them, as documented. An update after `job.step` would be missing in its checkpoint."""

    def made(folder: Path, stop_at: int) -> dict[str, Any]:
        one = parts()
        ema = AveragedModel(one["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
        one["optimizer"].register_step_post_hook(lambda *_: ema.update_parameters(one["model"]))
        job = solo(folder, interval="1").job
        job.manage(**one, ema=ema)
        for batch in job.batches(Numbers(), global_batch_size=5, micro_batch_size=5, max_steps=20, seed=3):
            if job.step((one["model"](batch) - 1).square().mean()).step == stop_at:
                break
        return {name: value.clone() for name, value in ema.state_dict().items()}

    undisturbed = made(tmp_path / "whole", 10)
    assert int(undisturbed["n_averaged"]) == 10
    for stop in (3, 5, 10):
        cut = made(tmp_path / "cut", stop)
    assert all(torch.equal(cut[name], value) for name, value in undisturbed.items())


def test_best_checkpoints_by_metric_stay_over_a_restart(solo: Make, tmp_path: Path) -> None:
    """A periodic checkpoint of the same step exists before the script measures it, so the next one records the
    metric."""
    losses = {2: 0.5, 4: 0.1, 6: 0.7, 8: 0.2, 10: 0.4}

    def measure(run: Any, steps: int) -> None:
        made = parts()
        run.job.manage(**made)
        for batch in run.job.batches(Numbers(), global_batch_size=2, micro_batch_size=2, max_steps=steps):
            result = run.job.step((made["model"](batch) - 1).square().mean())
            if result.step in losses:
                run.job.save(metrics={"val_loss": losses[result.step]})

    for steps, attempt_id in ((5, AttemptId(1, 1)), (12, AttemptId(1, 2))):
        measure(
            solo(tmp_path, interval="2", keep_last=1, retention="best=val_loss:min:2", attempt_id=attempt_id), steps
        )

    assert sorted(int(path.name.split(".")[0][5:]) for path in tmp_path.glob("step-*")) == [4, 8, 12]


def test_another_dataset_or_seed_than_was_saved_is_refused(solo: Make, tmp_path: Path) -> None:
    train(solo(tmp_path).job, 4)
    again = solo(tmp_path)
    again.job.manage(**parts())
    with pytest.raises(DataError, match="Numbers:24"):
        again.job.batches(Numbers(24), global_batch_size=4, micro_batch_size=2, max_steps=9, seed=3)
    with pytest.raises(DataError, match="pass the same seed"):
        again.job.batches(Numbers(), global_batch_size=4, micro_batch_size=2, max_steps=9, seed=4)


class Asks:
    """An object that reads the rank when it is saved, and the world size when it is restored."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.heard: list[int] = []

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.job.rank}

    def load_state_dict(self, state: Any) -> None:
        self.heard.append(self.job.world_size)


def test_managed_object_may_ask_for_its_world_during_restore(solo: Make, tmp_path: Path) -> None:
    first = solo(tmp_path).job
    first.manage(**parts(), asks=Asks(first))
    first.save()
    again = solo(tmp_path).job
    asks = Asks(again)
    again.manage(**parts(), asks=asks)
    assert asks.heard == [1]


def test_foreign_claim_is_reported_and_the_attempt_waits_to_end(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    other = Claim(attempt_id=AttemptId(7, 1), job_uid="other", publication="x", from_step=0)
    write_claim(tmp_path, other)
    with pytest.raises(BaseException) as ended:  # noqa: PT011  (the recorder's own)
        run.job.manage(**parts())
    assert type(ended.value).__name__ == "TheEnd"
    assert run.launcher.of("foreignClaims") == [{"claims": (other,)}]
    assert run.launcher.of("claim") == []


def test_a_damaged_commit_is_named_to_the_launcher(solo: Make, tmp_path: Path) -> None:
    train(solo(tmp_path, interval="4").job, 8)
    shard = tmp_path / "step-8.g1.a1" / "rank-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    again = solo(tmp_path, interval="4")
    again.job.manage(**parts())
    (told,) = again.launcher.of("restored")
    assert (told["step"], told["fromPair"]) == (4, {"generation": 1, "attempt": 1})
    assert told["quarantined"] == [
        {"path": "step-8.g1.a1", "reason": "rank-0.safetensors: digest of chunk 0 differs"}
    ]
    assert (told["stores"], told["lost"]) == ([str(tmp_path)], told["quarantined"])


def test_a_restore_says_to_the_launcher_how_exact_it_is(solo: Make, tmp_path: Path) -> None:
    """Step 4 is a full checkpoint. Step 8 is a delta, and leaves out changes below the threshold."""
    deltas = {"interval": "4", "full_every": 4, "delta_threshold": 0.5}
    said = []
    for steps in (4, 8):
        run = solo(tmp_path / str(steps), **deltas)
        train(run.job, 20, stop_at=steps)
        told_of(run, "interval", step=steps)
        again = solo(tmp_path / str(steps), **deltas)
        again.job.manage(**parts())
        said += [told["inexact"] for told in again.launcher.of("restored")]
    assert said == ["", "4 of 16 tensors are within 0.5 of the saved value, the others are exact"]


SCALED = Elasticity(batch="scaled", learning_rate="linear", reference_world_size=2, warmup_steps=4)


def test_scaled_job_keeps_its_batch_and_rate_over_a_restore(solo: Make, tmp_path: Path) -> None:
    """A world of one with a reference of two: half the batch, half the rate."""
    for steps in (3, 6):
        run = solo(tmp_path)
        made = parts()
        run.job.manage(**made, elasticity=SCALED)
        for batch in run.job.batches(Numbers(), global_batch_size=8, micro_batch_size=4, max_steps=steps):
            run.job.step((made["model"](batch) - 1).square().mean())
        assert run.job.audit().ok
        assert run.job.audit().seen.count == 4 * steps
    told = run.launcher.of("step")
    assert [(body["samples"], body["worldSize"]) for body in told] == [(4, 1)] * 3
    plain = solo(None)
    train(plain.job, 6)
    expected = [body["lr"] / 2 for body in plain.launcher.of("step")[3:]]
    assert [body["lr"] for body in told] == pytest.approx(expected)
