"""State is transferred from survivors to joining ranks bit for bit, or the receiver keeps what it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.training.recovery.state_transfer import (
    MESSAGES,
    OWN_BYTES,
    PREPARED_BYTES,
    SHARED_ABOVE_BYTES,
    Layout,
    ReceiveBuffers,
)

# Donors, receivers, and the launch before which the last donor dies; a first donor starts with two descriptions.
DEATHS = [(1, 1, 0), (1, 1, 1), (1, 2, 5), (2, 2, 0), (2, 1, 2)]


def unharmed(said: dict[str, Any]) -> bool:
    return bool(said["after"] == said["before"])


def test_a_newcomer_gets_the_donors_bits_and_its_side(ranks: Any) -> None:
    donor, newcomer = ranks.play().values()
    assert newcomer["got"] == donor["before"]
    assert newcomer["side"] == {"position": {"cursor": 640}, "counters": {"skipped": 2}, "from": 0}
    assert newcomer["owned"]
    assert unharmed(newcomer)


def test_several_donors_send_a_large_state_to_several_ranks(ranks: Any) -> None:
    """The receiving ranks join the world."""
    said = ranks.play("large", donors=3, newcomers=2)
    assert {said[rank]["got"] for rank in (3, 4)} == {said[0]["before"]}
    # 48 MiB and a bit in 8 MiB chunks, each to both receivers; the first donor sends two descriptions as well, the
    # others one.
    assert [said[rank]["launches"] for rank in (0, 1, 2)] == [2 * (2 + 3), 2 * (1 + 2), 2 * (1 + 2)]


def test_a_small_state_comes_from_one_donor(ranks: Any) -> None:
    said = ranks.play(donors=2, newcomers=1)
    assert said[2]["got"] == said[0]["before"]
    assert said[1]["launches"] == 0


@pytest.mark.parametrize(("donors", "newcomers", "at"), DEATHS)
def test_a_donors_death_leaves_a_newcomer_as_it_was(ranks: Any, donors: int, newcomers: int, at: int) -> None:
    victim = donors - 1
    said = ranks.play("large", donors=donors, newcomers=newcomers, fault={"rank": victim, "at": at, "act": "die"})
    for rank in range(donors, donors + newcomers):
        assert said[rank]["error"] == "PeerLostError"
        assert unharmed(said[rank])
    assert all(unharmed(one) for one in said.values())


def test_a_newcomers_death_costs_the_donor_nothing(ranks: Any) -> None:
    said = ranks.play("large", donors=1, newcomers=2, fault={"rank": 1, "at": 4, "act": "die"})
    assert said[0]["error"] == "PeerLostError"
    assert unharmed(said[0])
    assert unharmed(said[2])


@pytest.mark.parametrize(
    ("at", "which", "what"), [(1, "first", "description"), (4, "first", "chunk 2"), (2, "last", "chunk 0")]
)
def test_a_flipped_bit_is_found(ranks: Any, at: int, which: str, what: str) -> None:
    """In a tensor with its own message, and in a packed one."""
    said = ranks.play("large", fault={"rank": 0, "at": at, "act": f"flip {which}"})
    assert said[1]["error"] == "CorruptCheckpointError"
    assert f"{what} of the state from rank 0" in said[1]["message"]
    assert unharmed(said[1])


def test_donors_that_do_not_hold_the_same_tensors_are_found(ranks: Any) -> None:
    said = ranks.play("large", donors=2, newcomers=1, kinds={1: "other layout"})
    assert said[2]["error"] == "CorruptCheckpointError"
    assert said[2]["message"] == "ranks 0 and 1 do not hold the same tensors"


def test_prepared_memory_is_used_once_and_only_if_it_fits() -> None:
    room = ReceiveBuffers()
    room.prepare([(torch.float32, (3, 2))])
    first, second = (room.take(TensorSpec(name=name, dtype="F32", shape=(3, 2))) for name in ("a", "b"))
    assert first.tolist() == [[0.0, 0.0]] * 3
    assert first.data_ptr() != second.data_ptr()
    assert second.shape == (3, 2)
    assert room.take(TensorSpec(name="c", dtype="BF16", shape=(3, 2))).dtype == torch.bfloat16


def test_more_than_is_held_ahead_is_taken_when_it_comes() -> None:
    room = ReceiveBuffers()
    room.prepare([(torch.uint8, (8,)), (torch.uint8, (PREPARED_BYTES,)), (torch.uint8, (4,))])
    assert room.held == 8
    room.prepare([(torch.uint8, (4,))])
    assert room.held == 4, "nothing is held twice"


SIZES = st.integers(0, 5 * CHUNK_BYTES // 4)
SPECS = st.lists(
    st.tuples(st.sampled_from(["F32", "U8", "BF16"]), st.integers(0, 5 * CHUNK_BYTES // 4)), min_size=0, max_size=8
).map(lambda drawn: [TensorSpec(name=str(i), dtype=dtype, shape=(size,)) for i, (dtype, size) in enumerate(drawn)])


def test_chunk_of_single_tensor_messages_has_enough_tags() -> None:
    layout = Layout(
        TensorSpec(name=str(i), dtype="U8", shape=(OWN_BYTES,)) for i in range(CHUNK_BYTES // OWN_BYTES + 1)
    )
    assert [len(chunk.own) for chunk in layout.chunks] == [MESSAGES - 1, 1]


@settings(derandomize=True, deadline=None)
@given(specs=SPECS, donors=st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=4))
def test_every_byte_travels_once(specs: list[TensorSpec], donors: list[int]) -> None:
    layout = Layout(specs)
    went = {spec.name: 0 for spec in specs}
    for chunk in layout.chunks:
        assert chunk.nbytes <= CHUNK_BYTES
        assert len(chunk.own) < MESSAGES
        assert sorted([*chunk.own, *chunk.packed], key=chunk.segments.index) == list(chunk.segments)
        for segment in chunk.segments:
            assert segment.begin == went[segment.name]
            went[segment.name] = segment.end
    assert went == {spec.name: spec.nbytes for spec in specs}
    sharing = layout.sharing(donors)
    assert len(sharing) == (len(donors) if layout.nbytes > SHARED_ABOVE_BYTES else 1)
    sent = sorted(index for donor in sharing for index in layout.share_of(donor, sharing))
    assert sent == list(range(len(layout.chunks)))
