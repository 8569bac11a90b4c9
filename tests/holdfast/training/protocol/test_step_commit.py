"""Which state continues after a failure, and which transitions of a rank state the protocol permits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DocumentError, InvariantError
from holdfast.training.protocol.step_commit import (
    PreparedStep,
    RankState,
    affirmed,
    committed,
    invalidated,
    prepared,
    resolve,
    synchronised,
    voted,
)

A, B, C = AttemptId(1, 1), AttemptId(1, 2), AttemptId(2, 1)
NEWCOMER = RankState()
READY = RankState(step=7, voted=A, synced=A)
IN_DOUBT = voted(prepared(READY, A), A)
APPLIED = committed(IN_DOUBT)


def test_without_a_memory_nobody_survives() -> None:
    resolution = resolve([NEWCOMER, NEWCOMER])
    assert (resolution.survivors, resolution.newcomers, resolution.donor) == ((), (0, 1), None)


def test_the_last_vote_outranks_the_last_synchronisation() -> None:
    resolution = resolve([RankState(step=9, voted=A, synced=C), RankState(step=3, voted=B, synced=B), NEWCOMER])
    assert (resolution.survivors, resolution.donor, resolution.step, resolution.voted) == ((1,), 1, 3, B)
    assert resolution.newcomers == (0, 2)


def test_of_equal_votes_the_last_synchronisation_counts() -> None:
    resolution = resolve([RankState(step=7, voted=A, synced=A), RankState(step=8, voted=A, synced=B)])
    assert (resolution.survivors, resolution.step) == ((1,), 8)


def test_state_from_a_checkpoint_is_new_until_it_is_voted_on() -> None:
    restored = synchronised(NEWCOMER, C, 50, None)
    assert resolve([restored, READY]).survivors == (1,)
    assert resolve([voted(prepared(restored, C), C), READY]).survivors == (0,)


def test_a_newer_checkpoint_goes_on_instead_of_an_old_memory() -> None:
    assert resolve([READY], commit=B).donor is None
    assert resolve([READY], commit=A).donor == 0


def test_survivors_all_in_doubt_apply() -> None:
    resolution = resolve([IN_DOUBT, NEWCOMER, IN_DOUBT])
    assert (resolution.apply, resolution.step, resolution.survivors) == (True, 8, (0, 2))
    assert resolution.message == (
        "ranks 0, 2 continue from memory at step 8; step 8, in doubt on 0, 2, is applied: "
        "every survivor was prepared; 1 copy the state"
    )


def test_who_is_in_doubt_follows_who_applied() -> None:
    resolution = resolve([IN_DOUBT, APPLIED])
    assert (resolution.apply, resolution.step, resolution.donor) == (True, 8, 0)


def test_a_survivor_that_was_not_prepared_makes_all_discard() -> None:
    resolution = resolve([IN_DOUBT, READY])
    assert (resolution.apply, resolution.step, resolution.survivors) == (False, 7, (0, 1))
    assert "step 8, in doubt on 0, is discarded: a survivor was not prepared" in resolution.message


def test_prepared_and_not_yet_voted_in_a_new_attempt_is_no_doubt() -> None:
    ready = synchronised(READY, B, 7, A)
    assert not prepared(ready, B).in_doubt
    resolution = resolve([prepared(ready, B), ready])
    assert (resolution.apply, resolution.step, resolution.survivors) == (False, 7, (0, 1))


def test_survivors_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvariantError, match="disagree"):
        resolve([READY, APPLIED])
    with pytest.raises(InvariantError, match="disagree"):
        resolve([IN_DOUBT, replace(READY, step=9)])


def test_a_step_in_an_attempt() -> None:
    assert PreparedStep(attempt_id=A, step=7) == IN_DOUBT.prepared_step
    assert RankState(step=8, voted=A, synced=A) == APPLIED
    assert invalidated(IN_DOUBT) == NEWCOMER


@pytest.mark.parametrize("step", [7, 8])
def test_synchronising_settles_the_doubt_of_a_survivor(step: int) -> None:
    assert synchronised(IN_DOUBT, B, step, A) == RankState(step=step, voted=A, synced=B)


def test_a_newcomer_takes_over_the_donors_votes() -> None:
    resolution = resolve([APPLIED, NEWCOMER])
    joined = synchronised(NEWCOMER, B, resolution.step, resolution.voted)
    assert joined == synchronised(APPLIED, B, resolution.step, resolution.voted)
    assert resolve([joined]).survivors == (0,)


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda: prepared(READY, B),
        lambda: prepared(IN_DOUBT, A),
        lambda: voted(READY, A),
        lambda: voted(prepared(READY, A), B),
        lambda: committed(READY),
        lambda: synchronised(IN_DOUBT, B, 9, A),
        lambda: synchronised(IN_DOUBT, B, 7, None),
        lambda: synchronised(synchronised(NEWCOMER, A, 8, None), B, 9, None),
        lambda: synchronised(READY, A, 7, A),
        lambda: synchronised(READY, B, 8, A),
        lambda: synchronised(NEWCOMER, A, 8, B),
    ],
)
def test_what_the_protocol_forbids_is_refused(forbidden: object) -> None:
    assert callable(forbidden)
    with pytest.raises(InvariantError, match="a bug in Holdfast"):
        forbidden()


@pytest.mark.parametrize("rank_state", [NEWCOMER, READY, IN_DOUBT, APPLIED, synchronised(NEWCOMER, C, 5, None)])
def test_a_standing_travels_as_json(rank_state: RankState) -> None:
    assert RankState.from_json(rank_state.to_json()) == rank_state


@pytest.mark.parametrize("rubbish", [{}, {"step": "x"}, {"step": 1, "voted": 3, "synced": None, "doubt": None}])
def test_rubbish_is_no_standing(rubbish: dict[str, object]) -> None:
    with pytest.raises(DocumentError, match="not a"):
        RankState.from_json(rubbish)


def test_affirmed_prepared_step_outranks_others_of_its_attempt() -> None:
    """A rank that never entered B has the marks of A: before the first vote of B, its state could still continue."""
    outside = voted(prepared(READY, A), A)
    inside = synchronised(IN_DOUBT, B, 8, A)
    assert resolve([outside, inside]).survivors == (1,), "here both are asked"
    assert resolve([outside]).step == 8, "and alone it could roll forward too"
    unprepared = READY
    assert resolve([unprepared]).step == 7, "but one that was not prepared goes on without the step"
    assert resolve([unprepared, affirmed(inside, B)]).step == 8
    assert resolve([unprepared], commit=affirmed(inside, B).voted).donor is None, "a commit of B outranks it"
    with pytest.raises(InvariantError):
        affirmed(IN_DOUBT, A)
