"""Which calls of a script still run after its world has ended."""

from __future__ import annotations

import pytest

from holdfast import UsageError
from holdfast.training.data import Audit
from holdfast.training.data.loader import MicroBatch
from holdfast.training.data.script_batch import BatchState, ScriptBatch, Taken

MICRO = MicroBatch(data=None, samples=1, seen=Audit())


def held() -> ScriptBatch:
    batch = ScriptBatch()
    batch.give(MICRO, last=True)
    return batch


def without_world(batch: ScriptBatch) -> ScriptBatch:
    batch.take_back()
    batch.end_world()
    return batch


def test_a_batch_is_taken_once() -> None:
    batch = held()
    assert batch.held
    assert batch.take() == Taken(micro=MICRO, last=True)
    with pytest.raises(UsageError, match="without a batch"):
        batch.take()


def test_without_the_end_of_a_world_each_save_is_made() -> None:
    batch = held()
    assert not batch.skip_save()
    batch.take()
    assert not batch.skip_save()


def test_a_world_that_ends_in_the_step_loses_one_save() -> None:
    batch = held()
    batch.take()
    without_world(batch)
    assert (batch.skip_save(), batch.skip_save()) == (True, False)
    assert batch.state is BatchState.NONE


def test_the_next_batch_ends_the_wait_for_a_save() -> None:
    batch = held()
    batch.take()
    without_world(batch).give(MICRO, last=False)
    assert not batch.skip_save()
    assert batch.take() == Taken(micro=MICRO, last=False)


@pytest.mark.parametrize("saves_first", [True, False])
def test_world_ending_with_a_held_batch_loses_a_step_and_a_save(saves_first: bool) -> None:
    batch = without_world(held())
    if saves_first:
        assert (batch.skip_save(), batch.take()) == (True, None)
    else:
        assert (batch.take(), batch.skip_save()) == (None, True)
    assert batch.state is BatchState.NONE


def test_world_ending_in_a_save_loses_no_other_save() -> None:
    """If a step is still to come, one more save is lost."""
    batch = without_world(ScriptBatch())
    batch.end_world_in_save()
    assert not batch.skip_save()
    batch = without_world(held())
    batch.end_world_in_save()
    assert batch.skip_save()


def test_lost_step_stays_lost_when_the_next_world_ends_too() -> None:
    batch = without_world(held())
    assert batch.skip_save()
    without_world(batch).end_world_in_save()
    assert batch.take() is None


def test_a_save_while_the_next_world_is_announced_is_made() -> None:
    """Every rank makes this call in the next world, also a rank that joins."""
    batch = held()
    batch.take_back()
    assert not batch.skip_save()
