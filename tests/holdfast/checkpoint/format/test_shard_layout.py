"""Files are valid safetensors, aligned and without gaps. All ranks share the writing of replicated tensors."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.shard_layout import DATA_ALIGNMENT, ITEM_BYTES, TensorSpec, divide, plan_shard, whole

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
SPECS = st.dictionaries(
    st.text("abc/é", min_size=1, max_size=6), st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES)
)


def specs_of(table: dict[str, tuple[str, tuple[int, ...]]]) -> list[TensorSpec]:
    return [TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in table.items()]


@given(SPECS)
def test_data_starts_at_4_kib_without_gaps_and_is_aligned(table: dict[str, tuple[str, tuple[int, ...]]]):
    plan = plan_shard([whole(spec) for spec in specs_of(table)], metadata={"format": "pt"})
    assert len(plan.header) % DATA_ALIGNMENT == 0
    assert int.from_bytes(plan.header[:8], "little") == len(plan.header) - 8
    end = len(plan.header)
    for piece, offset in zip(plan.pieces, plan.offsets, strict=True):
        assert offset == end
        assert offset % ITEM_BYTES[piece.spec.dtype] == 0
        end = offset + piece.nbytes
    assert end == plan.nbytes
    named = json.loads(plan.header[8:])
    assert set(named) == {*table, "__metadata__"}


@given(table=SPECS, world_size=st.integers(1, 7))
def test_ranks_write_each_byte_of_each_tensor_exactly_once(
    table: dict[str, tuple[str, tuple[int, ...]]], world_size: int
) -> None:
    specs = specs_of(table)
    shares = divide(specs, world_size, least=1)
    assert len(shares) == world_size
    for share in shares:
        names = [piece.spec.name for piece in share]
        assert len(names) == len(set(names))  # a file names a tensor once
    for spec in specs:
        pieces = sorted((p for share in shares for p in share if p.spec == spec), key=lambda piece: piece.start)
        assert sum(piece.nbytes for piece in pieces) == spec.nbytes
        rows = 0
        for piece in pieces:
            assert not spec.shape or piece.start[0] == rows
            rows += piece.shape[0] if piece.shape else 1
        assert rows == (spec.shape[0] if spec.shape else 1)


@given(table=SPECS, world_size=st.integers(1, 5))
def test_every_rank_computes_the_same_division(
    table: dict[str, tuple[str, tuple[int, ...]]], world_size: int
) -> None:
    specs = specs_of(table)
    assert divide(specs, world_size, least=1) == divide(list(reversed(specs)), world_size, least=1)


def test_one_large_tensor_is_cut_so_that_all_ranks_write_alike() -> None:
    specs = [TensorSpec(name="big", dtype="F32", shape=(3000, 1000)), TensorSpec(name="b", dtype="F32", shape=(10,))]
    loads = [sum(piece.nbytes for piece in share) for share in divide(specs, 3)]
    assert max(loads) <= 1.01 * min(loads)
    assert sum(loads) == sum(4 * math.prod(spec.shape) for spec in specs)
