"""Boxes cover each element of a tensor once, or are refused. Their elements lie where slicing finds them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.manifest import Manifest, decode, encode
from holdfast.checkpoint.format.records import Chunk, FileRecord, Patch, TensorRecord
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.format.tensor_boxes import Box, runs, tiles
from holdfast.checkpoint.ranks.merge import Part, RankReport, join
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CorruptCheckpointError, StateError


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    cuts = [sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}) for length in shape]
    spans = [list(itertools.pairwise(own)) for own in cuts]
    boxes = [
        (tuple(begin for begin, _ in one), tuple(end - begin for begin, end in one))
        for one in itertools.product(*spans)
    ]
    return shape, draw(st.permutations(boxes))


@given(grids())
def test_all_combinations_of_cuts_make_a_tensor_up_and_no_fewer(grid: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = grid
    assert tiles(shape, boxes)
    assert not tiles(shape, boxes[1:])
    assert not tiles(shape, [*boxes, boxes[0]])
    assert not tiles((*shape[:-1], shape[-1] + 1), boxes)
    assert not tiles((*shape, 1), boxes)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_whatever_is_taken_for_whole_has_each_element_once(shape: list[int], data: st.DataObject) -> None:
    within = [st.integers(0, length + 1) for length in shape]
    boxes = data.draw(st.lists(st.tuples(st.tuples(*within), st.tuples(*within)), max_size=5))
    if tiles(shape, boxes):
        counted = np.zeros(shape, int)
        for start, size in boxes:
            counted[tuple(slice(begin, begin + length) for begin, length in zip(start, size, strict=True))] += 1
        assert (counted == 1).all()


@given(grids())
def test_the_runs_of_a_box_are_its_elements_in_its_own_order(grid: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = grid
    whole = np.arange(math.prod(shape)).reshape(shape)
    for start, size in boxes:
        box = whole[tuple(slice(begin, begin + length) for begin, length in zip(start, size, strict=True))]
        found = [place for first, count in runs(shape, (start, size)) for place in range(first, first + count)]
        assert found == box.reshape(-1).tolist()


# Division of the writes


def told(*parts: dict[str, tuple[tuple[int, ...], Box]]) -> list[RankReport]:
    """Build ranks that hold these boxes of tensors with these shapes."""
    return [
        RankReport(
            objects={"model": {name: {"$rows": [name, list(shape)]} for name, (shape, _) in one.items()}},
            parts={
                name: Part(spec=TensorSpec(name=name, dtype="F32", shape=shape), box=box)
                for name, (shape, box) in one.items()
            },
            mesh={},
        )
        for one in parts
    ]


@given(grids(), st.integers(1, 3))
def test_each_box_is_written_by_one_of_those_who_have_it(
    grid: tuple[tuple[int, ...], list[Box]], copies: int
) -> None:
    shape, boxes = grid
    ranks = told(*({"w": (shape, box)} for _ in range(copies) for box in boxes))
    joined = join(ranks)
    written = [(piece.start, piece.shape) for pieces in joined.shares.pieces for piece in pieces]
    assert sorted(written) == sorted(boxes)
    for one, pieces in zip(ranks, joined.shares.pieces, strict=True):
        assert all((piece.start, piece.shape) == one.parts["w"].box for piece in pieces)


def test_what_some_ranks_have_whole_is_divided_among_these() -> None:
    large = ((1 << 20, 4), ((0, 0), (1 << 20, 4)))
    ranks = told({"a": large}, {"a": large}, {"b": large})
    ranks = [replace(one, objects={f"stage{rank // 2}": {}}) for rank, one in enumerate(ranks)]
    first, second, third = (sum(piece.nbytes for piece in pieces) for pieces in join(ranks).shares.pieces)
    assert (first, second, third) == (8 << 20, 8 << 20, 16 << 20)


def test_empty_sharded_tensor_is_written_by_one_of_its_holders() -> None:
    """Every rank has the complete tensor, although no box covers any element."""
    nothing = ((0, 4), ((0, 0), (0, 0)))
    pieces = join(told({"w": nothing}, {"w": nothing})).shares.pieces
    assert [[piece.shape for piece in one] for one in pieces] == [[(0, 4)], []]


def test_part_held_by_no_rank_is_reported_before_any_write() -> None:
    with pytest.raises(StateError, match=r"the parts of w do not cover its shape \(4, 4\).*full_tensor"):
        join(told({"w": ((4, 4), ((0, 0), (4, 2)))}, {"w": ((4, 4), ((0, 3), (4, 1)))}))


# Valid and invalid manifests

FILES = {
    f"rank-{rank}.safetensors": FileRecord(nbytes=4096 + 32, digest="d" * 32, chunks=("c" * 32,)) for rank in (0, 1)
}


def chunk(rank: int, start: tuple[int, ...], shape: tuple[int, ...]) -> Chunk:
    return Chunk(file=f"rank-{rank}.safetensors", offset=4096, nbytes=4 * math.prod(shape), start=start, shape=shape)


def manifest(*chunks: Chunk, shape: tuple[int, ...] = (4, 4), patches: tuple[Patch, ...] = ()) -> Manifest:
    return Manifest(
        step=1,
        attempt_id=AttemptId(0, 1),
        job_uid="",
        publication="",
        run_id="",
        created="",
        world_size=2,
        mesh={"tensor": 2},
        tensors={"w": TensorRecord(dtype="F32", shape=shape, chunks=chunks, patches=patches)},
        files=FILES,
        state={"objects": {}},
        data=None,
        numerics={},
    )


def test_columns_are_of_version_4_and_rows_of_version_1() -> None:
    columns = manifest(chunk(0, (0, 0), (4, 2)), chunk(1, (0, 2), (4, 2)))
    assert (columns.version, decode(encode(columns))) == (4, columns)
    rows = manifest(chunk(0, (0, 0), (2, 4)), chunk(1, (2, 0), (2, 4)))
    assert (rows.version, decode(encode(rows))) == (1, rows)


PATCH = Patch(file="rank-0.safetensors", places=4096, values=4096, count=1, start=(0, 0), shape=(4, 4), bound=0.1)


@pytest.mark.parametrize(
    "lie",
    [
        manifest(chunk(0, (0, 0), (4, 2))),
        manifest(chunk(0, (0, 0), (4, 2)), chunk(1, (0, 1), (4, 2))),
        manifest(chunk(0, (0, 0), (4, 2)), chunk(1, (0, 0), (4, 2))),
        manifest(chunk(0, (0, 0), (4, 2)), chunk(1, (0, 3), (4, 2))),
        manifest(chunk(0, (0, 0), (4, 2)), chunk(1, (0, 2), (2, 2))),
        manifest(chunk(0, (0, 0), (4, 2)), chunk(1, (2,), (8,))),
        manifest(chunk(0, (0, 0), (4, 2)), chunk(1, (0, 2), (4, 2)), shape=(4, 5)),
        manifest(chunk(0, (0, 0), (4, 2)), chunk(1, (0, 2), (4, 2)), shape=(1 << 30, 1 << 30)),
        manifest(chunk(0, (0, 0), (4, 2)), chunk(1, (0, 2), (4, 2)), patches=(PATCH,)),
        manifest(*(chunk(0, (number,), ()) for number in range(4)), shape=(4,)),
    ],
)
def test_boxes_that_do_not_make_a_tensor_up_are_damage(lie: Manifest) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"do not cover it exactly|share bytes"):
        decode(encode(lie))
