"""What is made of the notes of a drill's script: three ranks, six samples a step, two steps an epoch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast_testbed.drill.job_view import AttemptId, parse_job
from holdfast_testbed.drill.matrix import CASES
from holdfast_testbed.drill.script_log import (
    Note,
    clear,
    longest_pause,
    lost_steps,
    newest_attempt,
    read,
    resumed_at,
    skipped_steps,
    struck_at,
    weights_equal,
    whole,
    worlds,
    wrong_samples,
)
from holdfast_testbed.drill.trial import Trial, newly_diverged

ONE, TWO = AttemptId(generation=1, attempt=1), AttemptId(generation=1, attempt=2)
THIRD, FOURTH = AttemptId(generation=2, attempt=1), AttemptId(generation=2, attempt=2)
EPOCH = (0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)


def note(do: str, attempt_id: AttemptId, step: int, pod: str = "w0", **more: object) -> Note:
    return Note(at=float(step), do=do, pod=pod, attempt_id=attempt_id, step=step, **more)  # type: ignore[arg-type]


def begin(attempt_id: AttemptId, step: int, weights: str, *pods: str) -> list[Note]:
    return [note("begin", attempt_id, step, pod, weights=weights) for pod in pods]


def step(attempt_id: AttemptId, number: int, *pods: str, weights: str = "", noted: int | None = None) -> list[Note]:
    """All take their shares of the step and (or only the first so many) note that it was committed."""
    samples = EPOCH[(number - 1) % 2]
    shares = [samples[n :: len(pods)] for n in range(len(pods))]
    takes = [note("take", attempt_id, number, pod, samples=share) for pod, share in zip(pods, shares, strict=True)]
    return takes + [note("commit", attempt_id, number, pod, weights=weights or f"h{number}") for pod in pods[:noted]]


THREE = ("w0", "w1", "w2")
# Rank w2 is killed after the commit of step 2, before it could note it.
STORY = [
    *begin(ONE, 0, "h0", *THREE),
    *step(ONE, 1, *THREE),
    *step(ONE, 2, *THREE, noted=2),
    *begin(TWO, 2, "h2", "w0", "w1"),
    *step(TWO, 3, "w0", "w1"),
]


def test_a_story_without_loss() -> None:
    assert newest_attempt(STORY) == TWO
    assert resumed_at(STORY, ONE, 0.0) == 3.0
    assert lost_steps(STORY) == 0
    assert worlds(STORY) == 2
    assert wrong_samples(STORY, batch=6, epoch=2) == 0
    assert weights_equal(STORY)
    assert longest_pause(STORY, 1.0) == 1.0


def test_repeated_steps_are_lost_but_their_samples_count_once() -> None:
    again = [*STORY[:-6], *begin(TWO, 1, "h1", "w0", "w1"), *step(TWO, 2, "w0", "w1"), *step(TWO, 3, "w0", "w1")]
    assert lost_steps(again) == 1
    assert wrong_samples(again, batch=6, epoch=2) == 0


def test_what_a_later_world_goes_back_is_lost_too() -> None:
    steps = (
        *step(TWO, 3, "w0", "w1"),
        *step(TWO, 4, "w0", "w1"),
        *begin(THIRD, 2, "h2", *THREE),
        *step(THIRD, 3, *THREE),
    )
    assert lost_steps([*STORY, *steps]) == 2


def test_a_step_is_lost_once_however_often_it_was_made() -> None:
    """The second world goes back from 9 to 3 and makes 4; the third begins with 5."""
    far = [note("commit", ONE, number) for number in range(1, 10)]
    assert lost_steps([*far, note("commit", TWO, 4), note("commit", THIRD, 5)]) == 6


def test_a_missed_or_repeated_sample_is_wrong() -> None:
    missed = [entry for entry in STORY if (entry.do, entry.step, entry.pod) != ("take", 3, "w1")]
    assert wrong_samples(missed, batch=6, epoch=2) == 3
    twice = [*STORY, note("take", ONE, 2, "w0", samples=(0,))]
    assert wrong_samples(twice, batch=6, epoch=2) == 1


def test_sample_that_was_skipped_counts_as_seen() -> None:
    story = [note("take", ONE, 1, samples=EPOCH[0][:5]), note("skip", ONE, 1, samples=EPOCH[0][5:])]
    assert wrong_samples([*story, note("commit", ONE, 1)], batch=6, epoch=2) == 0


@pytest.mark.parametrize(
    "odd",
    [
        note("commit", TWO, 3, "w1", weights="other"),
        note("begin", TWO, 2, "w3", weights="other"),
        note("begin", AttemptId(generation=2, attempt=1), 3, "w0", weights="h2"),
    ],
    ids=["ranks differ after a step", "a newcomer begins with others", "restored are those of another step"],
)
def test_other_weights_are_seen(odd: Note) -> None:
    assert not weights_equal([*STORY, odd])


def test_a_world_that_begins_with_an_unknown_step_is_seen() -> None:
    assert not weights_equal([*STORY, *begin(THIRD, 9, "h9", "w0", "w1")])
    later = [entry for entry in STORY if entry.step > 1]
    assert not weights_equal([*later, *begin(THIRD, 1, "h1", "w0", "w1")]), "what was before the notes is not known"


def test_a_prepared_step_may_be_applied_without_a_note_of_it() -> None:
    assert weights_equal([*STORY, *begin(THIRD, 4, "h4", "w0", "w1"), *begin(FOURTH, 4, "h4", "w0", "w1")])
    assert not weights_equal([*STORY, *begin(THIRD, 4, "h4", "w0"), *begin(FOURTH, 4, "other", "w0", "w1")])


def test_files_are_read_cleared_and_torn_lines_left_alone(tmp_path: Path) -> None:
    line = {"at": 1.5, "do": "struck", "pod": "w0", "attempt_id": [1, 2], "step": 7}
    file = tmp_path / "notes-w0.1.jsonl"
    file.write_text(json.dumps(line) + "\n" + json.dumps(line)[:20])
    assert read(tmp_path) == [Note(at=1.5, do="struck", pod="w0", attempt_id=TWO, step=7)]
    assert struck_at(read(tmp_path), 1.0) == 1.5
    clear(tmp_path)
    assert read(tmp_path) == []


def test_the_first_steps_after_a_clearing_do_not_count() -> None:
    torn = STORY[4:]  # of step 1 not all is there
    assert min(entry.step for entry in whole(torn, until=math.inf)) == 2
    assert wrong_samples(whole(torn, until=math.inf), batch=6, epoch=2) == 0


def test_a_step_made_while_files_are_read_is_not_judged() -> None:
    """The file of w0 was read before it took its share of step 4, those of the others after they committed it."""
    late = [entry for entry in step(TWO, 4, "w0", "w1") if entry.pod != "w0"]
    assert wrong_samples([*STORY, *late], batch=6, epoch=2) == 3
    assert wrong_samples(whole([*STORY, *late], until=3.5), batch=6, epoch=2) == 0


def test_a_trial_holds_if_nothing_is_lost_wrong_or_miscounted() -> None:
    case = next(case for case in CASES if case.name == "rank-killed")
    good = Trial(case=case.name, resumed=0.4, equal=True, counted={"Infrastructure": 1})
    assert good.held(case)
    for change in ({"lost": 1}, {"wrong": 1}, {"equal": False}, {"counted": {}}, {"resumed": None}):
        assert not Trial(**{**good.to_json(), **change}).held(case), change
    undisturbed = next(case for case in CASES if not case.cause)
    calm = Trial(case=undisturbed.name, resumed=0.1, equal=True)
    assert calm.held(undisturbed)
    assert not Trial(**{**calm.to_json(), "worlds": 2}).held(undisturbed), "it is promised the same world"
    assert not Trial(**{**calm.to_json(), "skipped": 1}).held(undisturbed), "it is promised every step"
    repeated = replace(undisturbed, repeated_steps=1)
    trials = [Trial(**{**calm.to_json(), "worlds": worlds, "detected": 0.1}) for worlds in (1, 2, 3)]
    assert [trial.held(repeated) for trial in trials] == [False, True, False]
    assert not replace(trials[1], detected=None).held(repeated), "no incident names it"


def test_a_step_that_must_be_skipped_is_not_completed_in_any_world() -> None:
    made = [*step(ONE, 1, *THREE), *step(ONE, 3, *THREE), *step(TWO, 3, *THREE), *step(TWO, 5, *THREE)]
    assert (skipped_steps(made), skipped_steps(made[:6]), skipped_steps([])) == (2, 0, 0)
    case = next(case for case in CASES if case.name == "nan-loss")
    good = Trial(case=case.name, resumed=0.1, equal=True, skipped=1)
    assert good.held(case)
    assert not Trial(**{**good.to_json(), "skipped": 0}).held(case), "the loss was not NaN, or the step was applied"


def test_a_rank_that_differs_is_counted_once_in_the_status_and_the_condition() -> None:
    case = next(case for case in CASES if case.name == "flip-weight")
    good = Trial(case=case.name, resumed=0.1, equal=True, divergences=1)
    assert good.held(case)
    for change in (
        {"divergences": 0},
        {"divergences": 2},
        {"equal": False},
        {"worlds": 2},
        {"lost": 1},
        {"wrong": 1},
    ):
        assert not Trial(**{**good.to_json(), **change}).held(case), change
    calm = next(case for case in CASES if not case.cause and not case.divergences)
    assert not good.held(calm), "no other fault makes replicas differ"
    told = {"divergences": {"count": 3}, "conditions": [{"type": "ReplicasDiverged", "status": "True"}]}
    assert newly_diverged(2, parse_job({"status": told})) == 1
    assert newly_diverged(2, parse_job({"status": {**told, "conditions": []}})) == 0
    assert newly_diverged(0, parse_job({})) == 0


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
