from __future__ import annotations

from collections.abc import Sequence

from holdfast.training.data.sample_range import SampleRange
from holdfast.training.guards.non_finite import NonFiniteSteps, Response, RollBack, respond, roll_back
from holdfast.training.guards.settings import Guards

GUARDS = Guards(lower_after=2, roll_back_after=4, max_roll_backs=2, max_skipped_steps=10)


def batch(step: int) -> SampleRange:
    return SampleRange(begin=10 * step, end=10 * step + 10)


def row(record: NonFiniteSteps, steps: Sequence[int], ranks: Sequence[int] = ()) -> NonFiniteSteps:
    for step in steps:
        record = record.with_skipped(step, [batch(step)], ranks)
    return record


def test_responses_of_a_row() -> None:
    record, seen = NonFiniteSteps(), []
    for step in range(7, 11):
        record = row(record, [step])
        seen.append(respond(GUARDS, record))
    assert seen == [Response.SKIP, Response.LOWER, Response.SKIP, Response.ROLL_BACK]
    assert (record.first, record.skipped) == (7, 4)


def test_finite_step_ends_a_row_and_keeps_the_count() -> None:
    record = row(NonFiniteSteps(), [3, 4, 5]).with_finite()
    assert record == NonFiniteSteps(skipped=3)
    assert respond(GUARDS, row(record, [7])) is Response.SKIP


def test_weight_that_is_not_finite_rolls_back_at_once() -> None:
    assert respond(GUARDS, row(NonFiniteSteps(), [3]), at_once=True) is Response.ROLL_BACK


def test_spent_budgets_fail_the_job() -> None:
    assert respond(GUARDS, row(NonFiniteSteps(skipped=10), [3])) is Response.FAIL
    assert respond(GUARDS, row(NonFiniteSteps(roll_backs=2), range(3, 7))) is Response.FAIL
    assert respond(GUARDS, row(NonFiniteSteps(roll_backs=2), [3]), at_once=True) is Response.FAIL


def test_learning_rate_stays_as_it_is_with_a_factor_of_1() -> None:
    guards = Guards(lower_after=2, learning_rate_factor=1)
    assert respond(guards, row(NonFiniteSteps(), [3, 4])) is Response.SKIP


def test_lower_learning_rate_ends_after_its_steps() -> None:
    guards = Guards(learning_rate_factor=0.5, lowered_steps=3)
    record = NonFiniteSteps().lowered(guards, 10)
    assert [record.factor_at(step) for step in (11, 13, 14)] == [0.5, 0.5, 1.0]
    assert record.lowered(guards, 12).factor_at(13) == 0.25
    assert record.lowered(guards, 20).factor_at(21) == 0.5


def test_roll_back_goes_before_the_row_and_skips_its_samples() -> None:
    record = row(NonFiniteSteps(), range(7, 11), ranks=[1])
    found = roll_back(record, (), 10)
    assert found.before == 7
    assert found.skipped == tuple(map(batch, range(7, 11)))
    assert found.record == NonFiniteSteps(skipped=4, roll_backs=1, reached=10)
    assert found.reason == "the loss on rank 1 of steps 7 to 10 was not finite"


def test_second_roll_back_from_the_same_steps_goes_further_back() -> None:
    before = NonFiniteSteps(skipped=4, roll_backs=1, reached=10, restored=5)
    found = roll_back(row(before, range(7, 11)), (batch(9),), 10)
    assert found.before == 5
    assert found.skipped == tuple(map(batch, range(7, 11)))


def test_later_trouble_goes_back_only_before_itself() -> None:
    before = NonFiniteSteps(skipped=4, roll_backs=1, reached=10, restored=5)
    assert roll_back(row(before, range(11, 15)), (), 14).before == 11


def test_description_without_a_rank() -> None:
    assert row(NonFiniteSteps(), [7]).description == "the gradients of step 7 were not finite"


def test_json_form_is_read_back() -> None:
    found = roll_back(row(NonFiniteSteps(), range(7, 11), ranks=[0, 2]), (), 10)
    assert RollBack.from_json(found.to_json()) == found
