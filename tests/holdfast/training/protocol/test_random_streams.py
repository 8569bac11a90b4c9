"""The seeds of each rank and step."""

from __future__ import annotations

from dataclasses import astuple

from holdfast.training.protocol.random_streams import Seeds, Streams


def seeds(number: int) -> Seeds:
    return Seeds(python=number, numpy=7, cpu=number, cuda=number)


STREAMS = Streams(ranks=(seeds(1), seeds(2)))


def test_each_rank_and_step_has_its_own_seeds() -> None:
    found = [STREAMS.at(step, rank).cpu for step in range(100) for rank in range(5)]
    assert len(set(found)) == 500


def test_seeds_that_the_script_set_alike_stay_alike_on_further_ranks_too() -> None:
    assert len({STREAMS.at(3, rank).numpy for rank in range(5)}) == 1


def test_further_ranks_of_a_job_that_began_with_one_have_other_seeds() -> None:
    single = Streams(ranks=(seeds(1),))
    assert all(one != other for one, other in zip(astuple(single.at(3, 0)), astuple(single.at(3, 1)), strict=True))


def test_seeds_are_read_as_they_were_written() -> None:
    assert Streams.from_json(STREAMS.to_json()) == STREAMS
