from __future__ import annotations

import pytest

from holdfast.training.data.bad_samples import BadSample, BadSamples, error_text


def bad(sample: int, step: int = 1) -> BadSample:
    return BadSample(sample=sample, rank=0, step=step, error="ValueError: broken")


def test_each_sample_is_kept_once_with_its_first_step_and_counted_again() -> None:
    record = BadSamples().with_skipped([bad(7), bad(3)]).with_skipped([bad(3, step=9), bad(5, step=9)])
    assert record == BadSamples(samples=(bad(7), bad(3), bad(5, step=9)), skipped=4)
    assert BadSamples.from_json(record.to_json()) == record


def test_record_without_new_samples_is_the_same() -> None:
    record = BadSamples().with_skipped([bad(7)])
    assert record.with_skipped([]) is record


WRAPPED = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "data.py", line 5, in __getitem__
ValueError: broken image
"""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("broken\nsecond line"), "ValueError: broken"),
        (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error"),
        (KeyError(), "KeyError"),
        (ValueError(WRAPPED), "ValueError: broken image"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 188),
    ],
)
def test_error_is_one_bounded_line(error: Exception, text: str) -> None:
    assert error_text(error) == text
