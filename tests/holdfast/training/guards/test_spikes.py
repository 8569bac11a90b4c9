"""Spikes of the loss and of the gradient norm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solo_job import Solo

from holdfast import Guards, NonFiniteError, PeerLostError
from holdfast.core.attempt import AttemptId
from holdfast.training.guards.spikes import Recent
from holdfast.training.step.train_state import TrainState

Make = Callable[..., Solo]
GUARDS = Guards(loss_spike="skip", gradient_spike="warn", spike_window=20)


def after(values: Sequence[float], guards: Guards = GUARDS, norm: float = 1.0) -> Recent:
    recent = Recent()
    for value in values:
        recent = recent.with_step(guards, value, norm)
    return recent


def noisy(count: int, *, middle: float = 2.0, deviation: float = 0.1) -> list[float]:
    draw = random.Random(0)
    return [draw.gauss(middle, deviation) for _ in range(count)]


def test_loss_far_above_the_last_ones_is_a_spike() -> None:
    spike = after(noisy(20)).spike(GUARDS, 4.0, 1.0)
    assert spike is not None
    assert (spike.quantity, spike.value, spike.skips) == ("loss", 4.0, True)
    assert 10 < spike.score < 40
    assert str(spike).startswith("the loss is 4, and the median of the last steps is ")


def test_lower_loss_and_usual_noise_are_no_spikes() -> None:
    recent = after(noisy(20))
    assert [recent.spike(GUARDS, loss, 1.0) for loss in (0.0, 2.0, 2.5)] == [None] * 3


def test_nothing_is_a_spike_before_half_a_window() -> None:
    assert after(noisy(9)).spike(GUARDS, 1e6, 1.0) is None
    assert after(noisy(10)).spike(GUARDS, 1e6, 1.0) is not None


def test_equal_values_leave_room_for_a_small_difference() -> None:
    recent = after([2.0] * 20)
    assert recent.spike(GUARDS, 2.01, 1.0) is None
    assert recent.spike(GUARDS, 2.03, 1.0) is not None


def test_values_of_zero_do_not_divide_by_zero() -> None:
    spike = after([0.0] * 20, norm=0.0).spike(GUARDS, 1.0, 0.0)
    assert spike is not None
    assert spike.score == math.inf


def test_stronger_response_of_two_spikes_counts() -> None:
    recent = after(noisy(20))
    both, norm = recent.spike(GUARDS, 4.0, 1e3), recent.spike(GUARDS, 2.0, 1e3)
    assert both is not None
    assert norm is not None
    assert (both.quantity, norm.quantity, norm.skips) == ("loss", "gradient norm", False)


def test_lasting_change_becomes_the_usual_value() -> None:
    recent = after([*noisy(20), *noisy(11, middle=8.0)])
    assert recent.spike(GUARDS, 8.1, 1.0) is None


def test_ignored_spikes_keep_no_values() -> None:
    guards = Guards(loss_spike="ignore", gradient_spike="ignore")
    assert after(noisy(200), guards) == Recent()
    assert len(after(noisy(200)).losses) == 20


def test_record_survives_json() -> None:
    recent = after(noisy(20))
    assert Recent.from_json(recent.to_json()) == recent


@given(
    st.lists(st.floats(0.1, 10.0), min_size=10, max_size=20), st.floats(0.0, 100.0), st.sampled_from([0.5, 2.0, 64.0])
)
def test_units_do_not_matter(losses: list[float], loss: float, unit: float) -> None:
    one = after(losses).spike(GUARDS, loss, 1.0)
    other = after([unit * value for value in losses]).spike(GUARDS, unit * loss, 1.0)
    assert (one is None) == (other is None)


# In a job of one rank


def train(run: Solo, factors: dict[int, float], steps: int = 16) -> list[str]:
    """Train, with the loss of some steps multiplied by a factor. Return the reasons."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    run.job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), max_grad_norm=1.0)
    data = torch.ones(4, 2)
    reasons = []
    while run.job.committed_step < steps:
        factor = factors.get(run.job.committed_step + 1, 1.0)
        before = model.weight.clone()
        result = run.job.step(model(data).square().mean() * factor)
        assert torch.equal(before, model.weight) == (result.reason == "Spike")
        reasons.append(result.reason)
    return reasons


@pytest.mark.parametrize(("response", "reason"), [("warn", "Committed"), ("skip", "Spike")])
def test_response_to_one_spike(solo: Make, caplog: pytest.LogCaptureFixture, response: str, reason: str) -> None:
    run = solo(None, guards=Guards(loss_spike=response, gradient_spike="ignore", spike_window=10))
    reasons = train(run, {9: 1000.0})
    assert reasons[8] == reason
    assert set(reasons[:8] + reasons[9:]) == {"Committed"}
    assert [(told["step"], told["quantity"]) for told in run.launcher.of("spike")] == [(9, "loss")]
    assert len(run.launcher.of("skipped")) == (response == "skip")
    assert any("the loss is" in line.message and "step 9" in line.message for line in caplog.records)


def test_gradient_spike_is_reported_by_default(solo: Make) -> None:
    run = solo(None, guards=Guards(loss_spike="ignore", spike_window=10))
    train(run, {9: 1000.0})
    assert [told["quantity"] for told in run.launcher.of("spike")] == ["gradient norm"]


def test_response_roll_back_needs_no_row(solo: Make) -> None:
    run = solo(None, guards=Guards(loss_spike="roll-back", spike_window=10))
    with pytest.raises(NonFiniteError, match="has no checkpoint folder"):
        train(run, {9: 1000.0})


def test_step_without_its_vote_has_its_responses_in_the_next_world(
    solo: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(loss_spike="roll-back", gradient_spike="ignore", spike_window=10)
    run = solo(tmp_path, attempt_id=AttemptId(1, 1), interval="3", guards=guards)
    run.launcher.moves_on = True
    stepped, lost = TrainState.stepped, []

    def breaks(state: TrainState, attempt_id: AttemptId) -> None:
        if state.step == 8 and not lost:
            lost.append(state)
            run.settle()
            raise PeerLostError("cut")
        stepped(state, attempt_id)

    monkeypatch.setattr(TrainState, "stepped", breaks)
    factors = {9: 1000.0}
    run.job.on_membership(lambda job: factors.clear() if run.launcher.of("rolledBack") else None)
    reasons = train(run, factors, steps=10)
    assert lost
    assert reasons == [*["Committed"] * 8, "RolledBack", *["Committed"] * 4]
    assert [told["step"] for told in run.launcher.of("skipped")] == [9]
    assert [told["step"] for told in run.launcher.of("restored")] == [0, 9, 6]


def test_job_continues_its_record_after_a_restart(solo: Make, tmp_path: Any) -> None:
    guards = Guards(loss_spike="skip", spike_window=10)
    run = solo(tmp_path, guards=guards)
    train(run, {}, steps=8)
    run.job.save()
    again = solo(tmp_path, guards=guards)
    assert train(again, {10: 1000.0})[:2] == ["Committed", "Spike"]
