from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast import UsageError


def test_defaults_are_valid() -> None:
    assert holdfast.Guards() == holdfast.Guards(lower_after=5, roll_back_after=10, max_roll_backs=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lower_after": 0}, r"^lower_after is 0: expected an integer of at least 1"),
        ({"roll_back_after": 2.5}, r"^roll_back_after is 2\.5: expected an integer"),
        ({"max_roll_backs": -1}, r"^max_roll_backs is -1"),
        ({"max_skipped_steps": True}, r"^max_skipped_steps is True"),
        ({"replica_check_steps": -1}, r"^replica_check_steps is -1: expected an integer of at least 0"),
        ({"lowered_steps": 0}, r"^lowered_steps is 0"),
        ({"learning_rate_factor": 0.0}, r"^learning_rate_factor is 0\.0: expected a number above 0 and at most 1"),
        ({"learning_rate_factor": 2}, r"^learning_rate_factor is 2"),
        ({"learning_rate_factor": float("nan")}, r"^learning_rate_factor is nan"),
        ({"learning_rate_factor": "half"}, r"^learning_rate_factor is 'half'"),
        ({"lower_after": 10}, r"never be lowered: lower lower_after, or set learning_rate_factor=1"),
        ({"max_skipped_steps": 9}, r"fail before it rolls back: raise max_skipped_steps, or set max_roll_backs=0"),
        ({"loss_spike": "stop"}, r"^loss_spike is 'stop': expected one of 'ignore', 'warn', 'skip', 'roll-back'"),
        ({"gradient_spike": None}, r"^gradient_spike is None: expected one of"),
        ({"loss_spike": "roll-back", "max_roll_backs": 0}, r"raise max_roll_backs, or set loss_spike='skip'"),
        ({"spike_score": 0.5}, r"^spike_score is 0\.5: expected a number of at least 1"),
        ({"spike_score": "10"}, r"^spike_score is '10'"),
        ({"spike_window": 9}, r"^spike_window is 9: expected an integer of at least 10"),
        ({"sample_retries": -1}, r"^sample_retries is -1"),
        ({"sample_retries": 11}, r"^sample_retries is 11, .*expected at most 10; retry for longer in the dataset"),
        ({"max_bad_samples": 1.5}, r"^max_bad_samples is 1\.5"),
        ({"max_bad_samples": 10_001}, r"^max_bad_samples is 10001, .*expected at most 10000; remove bad samples"),
    ],
)
def test_wrong_or_contradictory_settings_are_refused_when_they_are_built(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        holdfast.Guards(**given)


def test_settings_without_effect_may_have_any_order() -> None:
    holdfast.Guards(lower_after=11, learning_rate_factor=1)
    holdfast.Guards(max_skipped_steps=0, max_roll_backs=0)
