"""Several threads copy all bytes and no others, for all sizes and offsets."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.shard_layout import whole
from holdfast.checkpoint.io import memcpy
from holdfast.checkpoint.io.huge_pages import address_of
from holdfast.checkpoint.io.memcpy import Move, move
from holdfast.checkpoint.state.flatten import flatten_values

MIB = 1 << 20
SIZES = st.lists(st.sampled_from([0, 1, 5, 4096, MIB - 1, MIB, MIB + 1, 3 * MIB + 7, 13 * MIB + 3]), max_size=8)


@given(sizes=SIZES, gap=st.integers(0, 9), threads=st.integers(1, 4))
def test_every_byte_arrives_and_none_beside(sizes: list[int], gap: int, threads: int) -> None:
    noise = random.Random(1).randbytes(64 << 10) * (-(-sum(sizes) // (64 << 10)) + 1)
    source, target = bytearray(noise), bytearray(sum(sizes) + gap * (len(sizes) + 1))
    expected, moves, at, begin = bytearray(len(target)), [], gap, 0
    to, of = address_of(memoryview(target)) if target else 0, address_of(memoryview(source))
    for size in sizes:
        moves.append(Move(to + at, of + begin, size))
        expected[at : at + size] = source[begin : begin + size]
        at, begin = at + size + gap, begin + size
    move(moves, threads)
    assert target == expected


def test_no_split_block_is_too_short_for_non_temporal_stores() -> None:
    """A shorter block would go through the cache."""
    for nbytes in (memcpy.BLOCK_BYTES, 2 * memcpy.BLOCK_BYTES - 1, 3 * memcpy.BLOCK_BYTES + 7):
        blocks = [block.nbytes for block in memcpy._cut(Move(0, 0, nbytes))]
        assert min(blocks) >= memcpy.BLOCK_BYTES
        assert sum(blocks) == nbytes


def laid_out(tensor: torch.Tensor) -> bytes:
    """Lay the tensor out as `fill` does in a file, at an odd offset."""
    flat = flatten_values({"box": tensor})
    ((spec,), (saved,)) = flat.specs, flat.tensors.values()
    room = memoryview(bytearray(spec.nbytes + 3))
    flat.fill([(whole(spec), room[3:])])
    assert saved.shape == tensor.shape
    return bytes(room[3:])


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(24.0).reshape(4, 6), id="plain"),
        pytest.param(torch.arange(24.0).reshape(4, 6).t(), id="transposed"),
        pytest.param(torch.arange(24.0)[::2], id="every second"),
        pytest.param(torch.arange(24.0)[5:9], id="a part"),
        pytest.param(torch.tensor([1 + 2j, 3 - 4j]).conj(), id="conjugated lazily"),
        pytest.param(torch.tensor([1 + 2j, 3 - 4j]).conj().imag, id="negated lazily"),
        pytest.param(torch.ones(3).expand(2, 3), id="expanded"),
        pytest.param(torch.tensor([True, False, True]), id="bool"),
        pytest.param(torch.nn.Parameter(torch.arange(5, dtype=torch.bfloat16)), id="a parameter"),
        pytest.param(torch.zeros(0, 3), id="empty"),
        pytest.param(torch.tensor(7), id="a scalar"),
    ],
)
def test_state_is_laid_out_by_values_for_any_memory_layout(tensor: torch.Tensor) -> None:
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    assert laid_out(tensor) == values.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_no_more_threads_copy_than_there_are_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcpy, "PROCESSORS", 4)
    assert [memcpy.copiers(threads) for threads in (1, 3, 16)] == [2, 3, 4]
    monkeypatch.setattr(memcpy, "PROCESSORS", 1)
    assert memcpy.copiers(16) == 1
