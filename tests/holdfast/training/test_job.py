"""The loop in a world of one: what is restored, what is refused, what a failed save does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast import DataError, NonFiniteError, StateError, UsageError
from holdfast.checkpoint.folder.claims import write_claim
from holdfast.core.attempt import AttemptId, Claim
from holdfast.training.checkpointing import scheduler
from holdfast.training.launcher_client.connection import Requests
from holdfast.training.options.elasticity import Elasticity
from holdfast.training.step.stepper import let_go

Make = Callable[..., Any]
OWN_LOADER = Path(__file__).parent / "scripts" / "own_loader.py"


class Numbers:
    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0]) / 10


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    }


def train(job: Any, steps: int, *, stop_at: int | None = None, seed: int = 3) -> list[tuple[int, float]]:
    """Train to `steps`; `stop_at` plays a crash there."""
    made = parts()
    job.manage(**made)
    losses = []
    for batch in job.batches(Numbers(), global_batch_size=5, micro_batch_size=2, max_steps=steps, seed=seed):
        result = job.step((made["model"](batch) - 1).square().mean())
        if result.committed:
            losses.append((result.step, result.loss))
        if result.committed and result.step == stop_at:
            break
    return losses


def test_a_run_that_was_cut_goes_on_to_the_bit(solo: Make, tmp_path: Path) -> None:
    """Dropout draws from torch's generator, so this needs the generators' states too."""
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


def test_settings_of_the_script_that_a_checkpoint_replaces_are_named(
    solo: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(solo(tmp_path, interval="1").job, 20, stop_at=2)
    assert "settings" not in caplog.text
    longer = parts()
    longer["scheduler"].T_max = 40
    solo(tmp_path).job.manage(**longer)
    assert "scheduler: T_max is 20 in the checkpoint and 40 in the script" in caplog.text


class Tokens:
    """A count of the script's own."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_a_run_that_is_cut_again_and_again_has_the_rates_and_counts_of_an_undisturbed_one(
    solo: Make, tmp_path: Path
) -> None:
    """MultiStepLR keeps its milestones in a Counter, and looks at it when its turn comes."""

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


def test_averaged_weights_that_the_optimizer_updates_are_as_in_an_undisturbed_run(solo: Make, tmp_path: Path) -> None:
    """The docs say so: after `job.step` the checkpoint of the step is made already, and lacks one update."""

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


def test_the_last_step_is_durable_before_done_is_said(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    train(run.job, 7)
    kinds = [kind for kind, _ in run.launcher.told]
    assert kinds.index("restored") < kinds.index("claim") < kinds.index("step")
    assert kinds[-1] == "done"
    assert run.launcher.of("checkpoint")[-1]["step"] == 7
    assert (tmp_path / "step-7.g1.a1" / "MANIFEST.json").exists()


def test_a_finished_job_that_starts_again_makes_no_step_and_is_done(solo: Make, tmp_path: Path) -> None:
    train(solo(tmp_path).job, 7)
    again = solo(tmp_path)
    assert train(again.job, 7) == []
    assert again.launcher.of("step") == []
    assert again.launcher.of("done") == [{"step": 7}]


def test_commits_come_at_multiples_of_the_interval(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="3")
    train(run.job, 10)
    told = run.launcher.of("checkpoint")
    assert [(body["step"], body["ids"]) for body in told] == [
        (3, ["interval"]),
        (6, ["interval"]),
        (9, ["interval"]),
        (10, []),
    ]


def test_quiesce_commits_and_makes_no_step_after_it(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    run.launcher.wanted = Requests(quiesce=("drain",))
    with pytest.raises(BaseException) as ended:  # noqa: PT011  (the recorder's own)
        train(run.job, 10)
    assert type(ended.value).__name__ == "TheEnd"
    assert [kind for kind, _ in run.launcher.told if kind != "phase"][-2:] == ["checkpoint", "quiesced"]
    assert run.launcher.of("quiesced") == [{"step": 1}]
    assert (tmp_path / "step-1.g1.a1" / "MANIFEST.json").exists()


def test_quiesce_without_a_checkpoint_folder_needs_no_commit(solo: Make) -> None:
    run = solo(None)
    run.launcher.wanted = Requests(quiesce=("grow",))
    with pytest.raises(BaseException) as ended:  # noqa: PT011  (the recorder's own)
        train(run.job, 10)
    assert type(ended.value).__name__ == "TheEnd"
    assert run.launcher.of("quiesced") == [{"step": 1}]


def told_of(run: Any, request: str, *, step: int = 0) -> None:
    """Wait until the save of this step or a later one has answered a request, well or badly, and has ended."""
    deadline = time.monotonic() + 240
    while not any(request in body["ids"] and body["step"] >= step for body in run.launcher.of("checkpoint")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.settle()


def spoil(root: Path) -> None:
    """Put a file where the folder was: every save fails from now on."""
    root.rename(root.with_name("away"))
    root.write_text("")


def steps(job: Any, made: dict[str, Any], most: int) -> Iterator[int]:
    """Each step, once it is made."""
    for batch in job.batches(Numbers(), global_batch_size=4, micro_batch_size=4, max_steps=most):
        yield job.step(made["model"](batch).square().mean()).step


def mend(root: Path) -> None:
    """The folder is back."""
    root.unlink()
    root.with_name("away").rename(root)


def outcomes(run: Any) -> list[tuple[int, str]]:
    return [(body["step"], body["result"]) for body in run.launcher.of("checkpoint")]


def test_an_outage_of_the_storage_is_told_and_costs_a_healthy_run_nothing(
    solo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_commit_that_failed_is_tried_again_before_the_next_one_is_due(solo: Make, tmp_path: Path) -> None:
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


def at_the_fifth_failure(monkeypatch: pytest.MonkeyPatch, then: Callable[[], float]) -> None:
    """`then` says after how many seconds it is tried again; the first ones are at once."""
    monkeypatch.setattr(scheduler, "retry_after", lambda failed: then() if failed == 5 else 0.0)


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


def test_a_request_that_a_failed_save_did_not_answer_is_answered_later(solo: Make, tmp_path: Path) -> None:
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


def test_a_new_request_does_not_wait_for_the_next_try_of_a_failed_commit(
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


def test_a_step_that_is_not_finite_is_not_applied(solo: Make) -> None:
    run = solo(None)
    made = parts()
    run.job.manage(**made)
    outcomes = []
    for batch in run.job.batches(Numbers(), global_batch_size=4, micro_batch_size=4, max_steps=3):
        before = [parameter.clone() for parameter in made["model"].parameters()]
        factor = float("nan") if len(outcomes) == 1 else 1.0
        result = run.job.step(made["model"](batch).square().mean() * factor)
        same = all(torch.equal(a, b) for a, b in zip(before, made["model"].parameters(), strict=True))
        outcomes.append((result.step, result.committed, result.reason, same))
    assert outcomes == [(1, True, "Committed", False), (2, False, "NonFinite", True), (3, True, "Committed", False)]
    assert [body["step"] for body in run.launcher.of("step")] == [1, 3]


def test_ten_steps_in_a_row_that_are_not_finite_end_the_script(solo: Make) -> None:
    run = solo(None)
    made = parts()
    run.job.manage(**made)
    with pytest.raises(NonFiniteError, match=r"lower the learning rate.*holdfast checkpoints rewind FOLDER --step N"):  # noqa: PT012  (the loop raises)
        for batch in run.job.batches(Numbers(), global_batch_size=4, micro_batch_size=4, max_steps=30):
            run.job.step(made["model"](batch).square().mean() * float("inf"))
    assert run.job.committed_step == 10


def test_a_script_with_its_own_loader_makes_a_step_a_call_and_saves_when_it_says(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    made = parts()
    run.job.manage(**made)
    for index in range(3):
        result = run.job.step(made["model"](Numbers()[index]).square().mean(), samples=4)
        assert (result.committed, result.step) == (True, index + 1)
    assert run.job.save()
    again = solo(tmp_path)
    again.job.manage(**parts())
    assert again.job.committed_step == 3


def test_the_best_commits_by_what_the_script_measured_stay_also_over_a_restart(solo: Make, tmp_path: Path) -> None:
    """A commit that the interval made of this very step is there before the script measures: the next one tells."""
    losses = {2: 0.5, 4: 0.1, 6: 0.7, 8: 0.2, 10: 0.4}

    def measure(run: Any, steps: int) -> None:
        made = parts()
        run.job.manage(**made)
        for batch in run.job.batches(Numbers(), global_batch_size=2, micro_batch_size=2, max_steps=steps):
            result = run.job.step((made["model"](batch) - 1).square().mean())
            if result.step in losses:
                run.job.save(metrics={"val_loss": losses[result.step]})

    for steps, pair in ((5, AttemptId(1, 1)), (12, AttemptId(1, 2))):
        measure(solo(tmp_path, interval="2", keep_last=1, retention="best=val_loss:min:2", pair=pair), steps)

    assert sorted(int(path.name.split(".")[0][5:]) for path in tmp_path.glob("step-*")) == [4, 8, 12]


def test_a_metric_that_is_no_number_is_refused(solo: Make) -> None:
    with pytest.raises(UsageError, match=r"give finite numbers"):
        solo(None).job.save(metrics={"loss": float("nan")})


def test_a_rank_without_samples_weighs_nothing_and_a_step_without_any_is_refused(solo: Make) -> None:
    job = solo(None).job
    made = parts()
    job.manage(**made)
    before = [parameter.clone() for parameter in made["model"].parameters()]
    with pytest.raises(UsageError, match="no rank had a sample"):
        job.step(made["model"](torch.empty(0, 2)).mean(), samples=0)
    assert job.committed_step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, made["model"].parameters(), strict=True))


def test_phases_are_told_and_left_again(solo: Make) -> None:
    run = solo(None)
    run.job.manage(**parts())
    with run.job.phase("evaluation"):
        pass
    assert [body["phase"] for body in run.launcher.of("phase")] == ["restore", "step", "evaluation", "step"]
    with pytest.raises(UsageError, match="'lunch' is none that the launcher knows"), run.job.phase("lunch"):
        pass


def test_misuse_says_what_to_do(solo: Make) -> None:
    job = solo(None).job
    with pytest.raises(UsageError, match=r"call job\.manage"):
        job.step(torch.zeros(()))
    with pytest.raises(UsageError, match=r"call job\.manage"):
        job.batches(Numbers(), global_batch_size=4, micro_batch_size=2, max_steps=2)
    with pytest.raises(StateError, match="'extra' is of type int, which has no state_dict"):
        job.manage(extra=3)
    job.manage(**parts())
    with pytest.raises(UsageError, match="called twice"):
        job.manage(**parts())
    with pytest.raises(UsageError, match="phase"), job.phase(""):
        pass


def test_a_batch_without_its_step_is_refused(solo: Make) -> None:
    job = solo(None).job
    job.manage(**parts())
    with pytest.raises(UsageError, match="took a batch and did not call"):
        for _ in job.batches(Numbers(), global_batch_size=4, micro_batch_size=2, max_steps=2):
            pass


def test_a_step_without_its_batch_is_refused(solo: Make) -> None:
    job = solo(None).job
    made = parts()
    job.manage(**made)
    batch = next(iter(job.batches(Numbers(), global_batch_size=4, micro_batch_size=2, max_steps=2)))
    job.step(made["model"](batch).mean())
    with pytest.raises(UsageError, match="without a batch"):
        job.step(made["model"](batch).mean())


@pytest.mark.parametrize("most", [3, 4, 6])
def test_a_run_that_is_resumed_at_or_past_its_end_is_done_at_once_and_says_so(
    solo: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    train(solo(tmp_path).job, 4)
    again = solo(tmp_path)
    assert [step for step, _ in train(again.job, most)] == list(range(5, most + 1))
    assert again.launcher.of("done") == [{"step": max(4, most)}]
    assert ("step 4 is past max_steps 3" in caplog.text) == (most == 3)


def test_another_dataset_or_seed_than_was_saved_is_refused(solo: Make, tmp_path: Path) -> None:
    train(solo(tmp_path).job, 4)
    again = solo(tmp_path)
    again.job.manage(**parts())
    with pytest.raises(DataError, match="Numbers:24"):
        again.job.batches(Numbers(24), global_batch_size=4, micro_batch_size=2, max_steps=9, seed=3)
    with pytest.raises(DataError, match="give the same seed"):
        again.job.batches(Numbers(), global_batch_size=4, micro_batch_size=2, max_steps=9, seed=4)


def test_state_that_cannot_be_saved_is_refused_before_the_first_step(solo: Make, tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"open": sys.stdout}

        def load_state_dict(self, state: Any) -> None:
            return None

    run = solo(tmp_path)
    with pytest.raises(StateError, match=r"odd\.open is of type .*which cannot be saved without pickle"):
        run.job.manage(odd=Odd())
    assert list(tmp_path.iterdir()) == []


class Asks:
    """Asks the job for its rank whenever its state is taken or given."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.heard: list[int] = []

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.job.rank}

    def load_state_dict(self, state: Any) -> None:
        self.heard.append(self.job.world_size)


def test_a_managed_object_may_ask_for_its_place_while_it_is_restored(solo: Make, tmp_path: Path) -> None:
    first = solo(tmp_path).job
    first.manage(**parts(), asks=Asks(first))
    first.save()
    again = solo(tmp_path).job
    asks = Asks(again)
    again.manage(**parts(), asks=asks)
    assert asks.heard == [1]


def test_a_foreign_claim_is_told_and_the_attempt_waits_for_its_end(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, pair=AttemptId(1, 1))
    other = Claim(pair=AttemptId(7, 1), job_uid="other", publication="x", from_step=0)
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
    """Step 4 is a full commit, step 8 stands on it and leaves out what moved by less than the threshold."""
    deltas = {"interval": "4", "full_every": 4, "delta_threshold": 0.5}
    said = []
    for steps in (4, 8):
        run = solo(tmp_path / str(steps), **deltas)
        train(run.job, 20, stop_at=steps)
        told_of(run, "interval", step=steps)
        again = solo(tmp_path / str(steps), **deltas)
        again.job.manage(**parts())
        said += [told["inexact"] for told in again.launcher.of("restored")]
    assert said == ["", "4 of 16 tensors are within 0.5 of what was saved, the others are exact"]


def test_a_script_with_its_own_loader_ends_with_a_commit_of_its_last_step(solo: Make, tmp_path: Path) -> None:
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


SCALED = Elasticity(batch="scaled", learning_rate="linear", reference_world_size=2, warmup_steps=4)


def test_a_scaled_job_takes_its_own_batch_and_rate_and_keeps_both_over_a_restore(solo: Make, tmp_path: Path) -> None:
    """A world of one, for a reference of two: half the batch, half the rate."""
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


def test_a_model_that_changes_in_mid_run_is_in_no_commit(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    made = parts()
    run.job.manage(**made)
    run.job.step(made["model"](Numbers()[0]).square().mean())
    made["model"].append(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"model\.3\.weight, model\.3\.bias: new"):
        run.job.save()
    assert not list(tmp_path.glob("step-*"))


def test_what_is_no_loss_is_refused_at_step(solo: Make) -> None:
    job = solo(None).job
    made = parts()
    job.manage(**made)
    with pytest.raises(UsageError, match=r"loss\.mean\(\)"):
        job.step(made["model"](torch.ones(3, 2)))


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "code"), [(("3",), 0), (("3", "loss is negative"), 1)])
def test_the_end_of_a_process_commits_its_last_step_also_if_the_script_failed(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    environ = {**os.environ, "HOLDFAST_CHECKPOINT_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, str(OWN_LOADER), *words], env=environ, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert len(list(tmp_path.glob("step-3.*/MANIFEST.json"))) == 1


def test_a_loss_whose_step_was_given_up_holds_no_graph() -> None:
    """Its activations would stay while the step is tried again, and a large model has no memory for both."""
    weight = torch.nn.Parameter(torch.ones(2))
    loss = (weight * 3).sum()
    let_go(loss)
    assert loss.grad_fn is None
    assert float(loss) == 6.0
    view = (weight * 3)[:1].view(())
    let_go(view)
    assert float(view.detach()) == 3.0
