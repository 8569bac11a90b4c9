"""The reported progress of the ranks."""

from __future__ import annotations

from holdfast.launcher.ranks.progress import Progress


def test_responses_to_steps_that_are_not_finite_are_counted() -> None:
    progress = Progress()
    for step in range(1, 4):
        progress.count_guarded("skipped", {"step": step, "lowered": step == 2})
    progress.count_guarded("rolledBack", {"step": 3, "message": "m", "samples": 12})
    progress.count_guarded("spike", {"step": 3, "quantity": "loss", "value": 9.5, "usual": 2.0})
    assert progress.non_finite == {
        "skippedSteps": 3,
        "learningRateChanges": 1,
        "rollBacks": 1,
        "skippedSamples": 12,
        "spikes": 1,
    }


def test_skipped_samples_are_counted_from_the_full_number() -> None:
    progress = Progress()
    for number in (1, 40):
        progress.count_guarded("badSamples", {"step": 3, "number": number, "samples": [{}]})
    assert progress.bad_samples == 41
    progress.count_guarded("outOfMemory", {"step": 3, "rank": 1, "microBatch": 0, "message": ""})
    assert progress.out_of_memory == 1
