"""Every rank knows the position of all tensors in the files of all ranks. Rank 0 checks that their plans agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.file_names import CheckpointName, tensors_file
from holdfast.checkpoint.format.shard_layout import Holding, TensorSpec
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.writer import save
from holdfast.core.attempt import AttemptId

NAME = CheckpointName(step=7, attempt_id=AttemptId(1, 2))
SHAPES = st.lists(st.lists(st.integers(0, 700), max_size=3), max_size=6)


@given(shapes=SHAPES, size=st.integers(1, 4), held=st.integers(0, 6))
def test_tensor_records_match_the_headers_of_the_files(shapes: list[list[int]], size: int, held: int) -> None:
    specs = [TensorSpec(name=f"w{n}", dtype="F32", shape=tuple(shape)) for n, shape in enumerate(shapes)]
    names = frozenset(spec.name for spec in specs[:held] if spec.shape)
    holding = Holding(names=names, size=size, shards=tuple(range(size))) if names else None
    layouts = Planner().layouts(specs, holding, size)
    headers = [layouts.plan(NAME, rank).header for rank in range(size)]
    records = layouts.records(headers)
    in_files = {
        (name, tensors_file(rank), len(header) + entry["data_offsets"][0], tuple(entry["shape"]))
        for rank, header in enumerate(headers)
        for name, entry in json.loads(header[8:]).items()
        if name != "__metadata__"
    }
    in_records = {
        (name, chunk.file, chunk.offset, chunk.shape) for name, record in records.items() for chunk in record.chunks
    }
    assert in_records == in_files


def test_plan_is_kept_until_a_name_or_the_world_changes() -> None:
    planner, specs = Planner(), [TensorSpec(name="w", dtype="F32", shape=(3,))]
    first = planner.layouts(specs, None, 2)
    assert planner.layouts(list(specs), None, 2) is first
    assert planner.layouts(specs, None, 3) is not first
    other = planner.layouts([TensorSpec(name="v", dtype="F32", shape=(3,))], None, 1)
    assert other.records([b""]).keys() == {"v"}


def test_rank_with_other_tensors_fails_the_save_by_its_number(
    tmp_path: Path, world: Callable[..., list[Any]], commit_by: Callable[..., Any]
) -> None:
    tensors = [{"a": b"x" * 10, "b": b"y" * 10}, {"a": b"x" * 10, "c": b"y" * 10}]
    results = world(2, lambda exchange: commit_by(exchange, tmp_path, 5, tensors[exchange.rank]))
    assert {result.message for result in results} == {
        "rank 0: rank 1 saves tensors with other names or shapes than rank 0 expects"
    }
    assert list(tmp_path.iterdir()) == []


def test_rank_with_other_rows_fails_the_save(tmp_path: Path, world: Callable[..., list[Any]]) -> None:
    """The header of its file is equal to that of the other plan."""
    cut = TensorSpec(name="cut", dtype="F32", shape=(1024, 4096))
    alone = TensorSpec(name="alone", dtype="F32", shape=(1024, 3072))
    specs = [[cut, alone], [cut]]
    planned = [Planner().layouts(one, None, 2).plan(NAME, 1) for one in specs]
    assert planned[0].header == planned[1].header
    assert planned[0].pieces[0].start != planned[1].pieces[0].start

    results = world(2, lambda exchange: save(tmp_path, zeros(specs[exchange.rank]), exchange))
    assert not any(result.committed for result in results)
    assert list(tmp_path.iterdir()) == []


def zeros(specs: list[TensorSpec]) -> Snapshot:
    return Snapshot(
        name=NAME,
        specs=specs,
        read=lambda piece: bytes(piece.nbytes),
        state={"objects": {}, "counters": {}},
        data=None,
        per_rank={},
        numerics={},
    )
