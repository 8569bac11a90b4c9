"""The order of samples is a permutation without a stored list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.training.data import Permutation

KEYS = st.integers(min_value=0, max_value=2**64 - 1)


@given(size=st.integers(min_value=1, max_value=700), key=KEYS)
def test_every_sample_has_exactly_one_place(size: int, key: int) -> None:
    order = Permutation(size, key=key)
    assert sorted(order(place) for place in range(size)) == list(range(size))


@given(size=st.integers(min_value=1, max_value=10**12), key=KEYS, data=st.data())
def test_a_lookup_in_a_huge_dataset_stays_inside_it(size: int, key: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(min_value=0, max_value=size - 1))
    assert 0 <= Permutation(size, key=key)(place) < size


def test_other_keys_give_other_orders() -> None:
    orders = {tuple(Permutation(20, key=key)(place) for place in range(20)) for key in range(200)}
    assert len(orders) == 200


def test_neighbours_are_scattered() -> None:
    order = Permutation(10_000, key=1)
    adjacent = sum(abs(order(place) - order(place + 1)) == 1 for place in range(9_999))
    assert adjacent < 20  # about two are expected by chance


@pytest.mark.parametrize("place", [-1, 5])
def test_a_place_outside_is_refused(place: int) -> None:
    with pytest.raises(IndexError, match="not in a permutation of 5"):
        Permutation(5, key=0)(place)
