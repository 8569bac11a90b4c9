"""The samples of a step depend on the position only, not on the world size or the restore."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import DataError
from holdfast.training.data import Audit, Position, expected_audit, micro_batches, sample_at, share_of

SIZES = st.integers(min_value=1, max_value=60)
BATCHES = st.integers(min_value=1, max_value=40)
WORLDS = st.integers(min_value=1, max_value=9)


def step_samples(position: Position, *, size: int, batch: int, world: int, micro: int) -> list[tuple[int, int]]:
    """Return what all ranks of a world fetch for one step, in order of ranks."""
    places = [
        place
        for rank in range(world)
        for part in micro_batches(share_of(cursor=position.cursor, batch=batch, rank=rank, world_size=world), micro)
        for place in range(part.begin, part.end)
    ]
    return [sample_at(place, size=size, seed=position.seed) for place in places]


@given(size=SIZES, batch=BATCHES, world=WORLDS, micro=st.integers(1, 7), steps=st.integers(0, 9), seed=st.integers(0))
def test_any_world_sees_the_samples_that_one_rank_would_see(  # noqa: PLR0917  (hypothesis gives them by name)
    size: int, batch: int, world: int, micro: int, steps: int, seed: int
) -> None:
    position = Position(fingerprint="f", seed=seed, cursor=steps * batch)
    alone = step_samples(position, size=size, batch=batch, world=1, micro=batch)
    assert step_samples(position, size=size, batch=batch, world=world, micro=micro) == alone


@given(batch=BATCHES, world=WORLDS, cursor=st.integers(0, 10**9))
def test_shares_differ_by_at_most_one_sample(batch: int, world: int, cursor: int) -> None:
    shares = [share_of(cursor=cursor, batch=batch, rank=rank, world_size=world) for rank in range(world)]
    lengths = [share.end - share.begin for share in shares]
    assert sum(lengths) == batch
    assert lengths[0] >= 1
    assert max(lengths) - min(lengths) <= 1


@given(size=SIZES, batch=BATCHES, worlds=st.lists(WORLDS, min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_run_with_changing_worlds_sees_each_sample_once_an_epoch(
    size: int, batch: int, worlds: list[int], seed: int
) -> None:
    position = Position(fingerprint="f", seed=seed)
    for world in worlds:
        seen = Audit()
        for epoch, sample in step_samples(position, size=size, batch=batch, world=world, micro=3):
            seen = seen.seen(epoch, sample)
        position = Position.from_json(position.advanced(batch, seen).to_json())  # a save and a restore
    assert position.audit == expected_audit(size=size, seed=seed, cursor=position.cursor)
    assert position.audit.count == batch * len(worlds)


@given(size=st.integers(2, 60), steps=st.integers(1, 5), data=st.data())
def test_audit_finds_skipped_and_repeated_samples(size: int, steps: int, data: st.DataObject) -> None:
    cursor = size * steps
    right = expected_audit(size=size, seed=1, cursor=cursor)
    skipped, doubled = data.draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))
    wrong = Audit()
    for epoch in range(steps):
        for sample in range(size):
            wrong = wrong.seen(epoch, doubled if (epoch, sample) == (0, skipped) else sample)
    assert (wrong == right) == (skipped == doubled)


def test_epochs_have_orders_of_their_own() -> None:
    epochs = [[sample_at(epoch * 50 + i, size=50, seed=3)[1] for i in range(50)] for epoch in range(4)]
    assert len({tuple(order) for order in epochs}) == 4
    assert all(sorted(order) == list(range(50)) for order in epochs)


def test_another_dataset_is_refused() -> None:
    saved = Position(fingerprint="Text:100", seed=0, cursor=8)
    with pytest.raises(DataError, match="pass the same dataset, or start in an empty checkpoint folder"):
        Position(fingerprint="Text:101", seed=0).resumed(saved)


def test_another_seed_is_refused() -> None:
    saved = Position(fingerprint="Text:100", seed=0, cursor=8)
    with pytest.raises(DataError, match="seed 0, but the script passes 1"):
        Position(fingerprint="Text:100", seed=1).resumed(saved)
