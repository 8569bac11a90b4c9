"""Chunks are read in pieces that cover them, and complete pages are read without a copy. Rows equal those written."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.io.huge_pages import PAGE
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.chunk_reader import segments
from holdfast.checkpoint.restore.memory_layout import Extent
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.stores.folder import FolderSource, FolderStore

SPACE = memoryview(mmap.mmap(-1, 2 * CHUNK_BYTES))
KIB = 1024


GAP, SIZE = some.integers(0, 300 * KIB), some.integers(1, 900 * KIB)


@some.composite
def extents(draw: Callable[..., Any]) -> list[Extent]:
    """Draw requested ranges around a chunk, in order. Some of them have the memory layout of the file."""
    found, at = [], 0
    for gap, size, shift in draw(some.lists(some.tuples(GAP, SIZE, some.sampled_from([0, 16])), max_size=8)):
        begin, at = at + gap, at + gap + size
        found.append(Extent(offset=begin, target=SPACE[begin : begin + size], address=begin + shift))
    return found


@given(
    extents=extents(), begin=some.integers(0, 3).map(lambda n: n * 512 * KIB), grain=some.sampled_from([0, 1, PAGE])
)
def test_chunk_is_covered_once_by_page_aligned_direct_pieces(extents: list[Extent], begin: int, grain: int) -> None:
    end = begin + 700 * KIB + 13
    found = segments(begin, end, [e for e in extents if e.offset < end and e.end > begin], grain)
    assert [found[0].begin, *(s.end for s in found)] == [*(s.begin for s in found), end]
    assert found[0].begin == begin
    for segment in found:
        if segment.target is None:
            continue
        assert segment.target.nbytes == segment.end - segment.begin
        owner = next(e for e in extents if e.offset <= segment.begin and segment.end <= e.end)
        if grain:
            assert segment.begin % grain == (owner.address - owner.offset) % grain == 0
            assert segment.end % grain == 0 or segment.end == end
        else:
            assert (segment.begin, segment.end) == (begin, end)


@pytest.fixture(scope="module")
def tensors() -> dict[str, bytes]:
    """Tensors of many chunks and of a few bytes. No size is a multiple of the page size."""
    sizes = {
        "a/large": 2 * CHUNK_BYTES + 777,
        "a/small": 5,
        "b/middle": CHUNK_BYTES // 3 + 1,
        "b/none": 0,
        "c": 65537,
    }
    return {name: os.urandom(size) for name, size in sizes.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_rows_of_any_number_of_writers_are_read_unchanged(
    tmp_path: Path, world: Callable[..., Any], commit_by: Callable[..., Any], tensors: dict[str, bytes], ranks: int
) -> None:
    assert all(r.committed for r in world(ranks, lambda exchange: commit_by(exchange, tmp_path, 1, tensors)))
    dice = random.Random(ranks)
    for _ in range(4):
        rows = {name: tuple(sorted(dice.choices(range(len(data) + 1), k=2))) for name, data in tensors.items()}
        rows.pop(dice.choice(sorted(rows)))  # all of it
        loaded = restore(tmp_path, SingleRank(), select=lambda _, rows=rows: rows).loaded
        assert loaded is not None
        for name, data in tensors.items():
            begin, end = rows.get(name, (0, len(data)))
            assert loaded.tensors[name] == data[begin:end], name


FEW_FILES = """
import resource, sys
from pathlib import Path
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.cli.checkpoints.main import main
resource.setrlimit(resource.RLIMIT_NOFILE, (24, int(sys.argv[2])))
print(main(["verify", sys.argv[1]]), restore(Path(sys.argv[1]), SingleRank()).loaded is not None)
"""


@pytest.mark.parametrize(("allowed", "said"), [(512, "0 True"), (24, "Too many open files")])
def test_more_files_than_the_open_limit_are_read(
    tmp_path: Path,
    world: Callable[..., Any],
    commit_by: Callable[..., Any],
    allowed: int,
    said: str,
) -> None:
    """The reader raises the soft limit as far as the hard limit permits."""
    world(40, lambda exchange: commit_by(exchange, tmp_path, 1, {"a": b"x" * 1000}))
    command = [sys.executable, "-c", FEW_FILES, str(tmp_path), str(allowed)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said in ran.stdout + ran.stderr
    assert not (tmp_path / "quarantine").exists()


class Counted(FolderStore):
    """Remember which bytes were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        self.read: list[tuple[str, int, int]] = []

    def open(self, name: CheckpointName, file: str) -> FolderSource:
        read = self.read

        class Counting(FolderSource):
            def read_into(self, offset: int, target: memoryview) -> None:
                read.append((file, offset, target.nbytes))
                super().read_into(offset, target)

        return Counting(self.root / str(name) / file)


def test_only_the_slices_that_hold_wanted_rows_are_read(
    tmp_path: Path, commit: Callable[..., Any], tensors: dict[str, bytes]
) -> None:
    commit(tmp_path, 1, {"a": tensors["a/large"]})
    store = Counted(tmp_path)
    restore([store], SingleRank(), select=lambda _: {"a": (CHUNK_BYTES, CHUNK_BYTES + 10)})
    read = [entry for entry in store.read if entry[0] == "rank-0.safetensors"]
    assert {offset // PAGE for _, offset, _ in read} == {0, CHUNK_BYTES // PAGE + 1}  # the header and the read bytes
    header = 8 + PAGE  # its length, then all of it; then both are read to be verified
    assert sum(nbytes for _, _, nbytes in read) == header + 2 * PAGE


@pytest.mark.parametrize("place", [20, CHUNK_BYTES - 1, 2 * CHUNK_BYTES + 4500])
def test_ranks_reading_only_their_rows_find_all_corruption(
    tmp_path: Path, world: Callable[..., Any], commit: Callable[..., Any], tensors: dict[str, bytes], place: int
) -> None:
    data = tensors["a/large"]
    commit(tmp_path, 1, {"a": data})
    commit(tmp_path, 2, {"a": data})
    path = tmp_path / "step-2.g1.a1" / "rank-0.safetensors"
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 2]))
    half = len(data) // 2  # no rank requests the first bytes

    def read(exchange: Exchange) -> Any:
        rows = {"a": (99, half) if exchange.rank == 0 else (half, len(data))}
        return restore(tmp_path, exchange, select=lambda _: rows)

    first, second = world(2, read)
    assert (first.step, second.step) == (1, 1)
    assert bytes(first.loaded.tensors["a"]) + bytes(second.loaded.tensors["a"]) == data[99:]
    assert first.quarantined == second.quarantined
    assert f"digest of chunk {place // CHUNK_BYTES} differs" in first.quarantined[0].reason
