"""To read a part of a chunk, only the slices around it are read. No result depends on their digests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as some

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.checkpoint.io import slice_digests
from holdfast.checkpoint.io.slice_digests import Slicer, decode, digests_of, file_bytes, slice_bytes
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.chunk_reader import cover
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.stores.folder import FolderSource, FolderStore

KIB = 1024
SLICES, TENSORS = "rank-0.slices", "rank-0.safetensors"


def record_of(data: bytes) -> FileRecord:
    return FileRecord(nbytes=len(data), digest=xxhash.xxh3_128_hexdigest(data), chunks=())


def encoded(data: bytes, cuts: list[int]) -> bytes:
    slicer = Slicer(len(data))
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        slicer.update(data[begin:end])
    return slicer.encode(record_of(data))


@given(size=some.integers(0, 40 * KIB), cuts=some.lists(some.integers(0, 40 * KIB), max_size=6))
def test_digests_do_not_depend_on_how_the_bytes_are_fed(size: int, cuts: list[int]) -> None:
    data = os.urandom(size)
    raw = encoded(data, cuts)
    found = decode(raw, record_of(data))
    assert found is not None
    assert list(found.digests) == list(digests_of(memoryview(data), found.size))
    assert len(raw) <= min(file_bytes(size), slice_digests.LARGEST)


@given(size=some.integers(1, 20 * KIB), place=some.integers(0), bit=some.integers(0, 7), cut=some.integers(0))
def test_what_was_damaged_or_cut_or_is_of_another_file_is_none(size: int, place: int, bit: int, cut: int) -> None:
    data = os.urandom(size)
    raw = encoded(data, [])
    bad = bytearray(raw)
    bad[place % len(raw)] ^= 1 << bit
    assert decode(bytes(bad), record_of(data)) is None
    assert decode(raw[: cut % len(raw)], record_of(data)) is None
    assert decode(raw, record_of(data + b"x")) is None
    assert decode(raw, record_of(os.urandom(size) + b"y")) is None


@pytest.mark.parametrize("nbytes", [0, 1, 5 << 20, 1 << 30, 100 << 30, 1 << 50])
def test_digest_count_is_bounded_for_any_file_size(nbytes: int) -> None:
    size = slice_bytes(nbytes)
    assert 4096 <= size <= CHUNK_BYTES
    assert CHUNK_BYTES % size == 0
    assert nbytes > CHUNK_BYTES << 14 or file_bytes(nbytes) <= slice_digests.LARGEST


RANGES = some.lists(some.tuples(some.integers(0, 3 * CHUNK_BYTES), some.integers(1, 900 * KIB)), max_size=8)


@given(ranges=RANGES, size=some.sampled_from([4 * KIB, 64 * KIB, CHUNK_BYTES]), rest=some.integers(0, CHUNK_BYTES))
def test_ranges_are_covered_once_by_pieces_within_their_chunk(
    ranges: list[tuple[int, int]], size: int, rest: int
) -> None:
    nbytes = 3 * CHUNK_BYTES + 900 * KIB + rest
    wanted = [(begin, begin + length) for begin, length in ranges]
    found = cover(wanted, size, nbytes)
    for begin, end in found:
        assert 0 <= begin < end <= nbytes
        assert begin % size == 0
        assert end % size == 0 or end == nbytes
        assert begin // CHUNK_BYTES == (end - 1) // CHUNK_BYTES
        assert any(low < end and begin < high for low, high in wanted)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))
    for low, high in wanted:
        assert sum(max(0, min(high, end) - max(low, begin)) for begin, end in found) == high - low


def test_an_empty_file_is_looked_for_all_the_same() -> None:
    assert cover([], CHUNK_BYTES, 0) == [(0, 0)]


# Checkpoints


class Counted(FolderStore):
    """Count the bytes read from each file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        self.read: dict[str, int] = {}

    def open(self, name: CheckpointName, file: str) -> FolderSource:
        read = self.read

        class Counting(FolderSource):
            def read_into(self, offset: int, target: memoryview) -> None:
                read[file] = read.get(file, 0) + target.nbytes
                super().read_into(offset, target)

        return Counting(self.root / str(name) / file)


@pytest.fixture
def data() -> dict[str, bytes]:
    """Four tensors that neither begin nor end at a chunk boundary."""
    return {f"w{number}": os.urandom(5_000_001) for number in range(4)}


def halves(exchange: Exchange, data: dict[str, bytes]) -> dict[str, tuple[int, int]]:
    middle = {name: len(value) // 2 for name, value in data.items()}
    return {
        name: (0, middle[name]) if exchange.rank == 0 else (middle[name], len(value)) for name, value in data.items()
    }


def test_two_ranks_reading_half_of_each_tensor_read_little_more(
    tmp_path: Path, world: Callable[..., Any], commit: Callable[..., Any], data: dict[str, bytes]
) -> None:
    commit(tmp_path, 1, data)
    stores = [Counted(tmp_path) for _ in range(2)]

    def read(exchange: Exchange) -> Any:
        rows = halves(exchange, data)
        found = restore([stores[exchange.rank]], exchange, select=lambda _: rows).loaded
        assert found is not None
        assert all(found.tensors[name] == data[name][begin:end] for name, (begin, end) in rows.items())

    world(2, read)
    needed = sum(map(len, data.values()))
    assert sum(sum(store.read.values()) for store in stores) <= 1.05 * needed


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(100)


def of_another_file(path: Path) -> None:
    path.write_bytes(encoded(os.urandom(20_000_000), []))


@pytest.mark.parametrize("spoil", [Path.unlink, cut_short, of_another_file], ids=["missing", "damaged", "another's"])
def test_without_valid_digests_complete_chunks_are_read(
    tmp_path: Path, world: Callable[..., Any], commit: Callable[..., Any], data: dict[str, bytes], spoil: Any
) -> None:
    """Nothing is quarantined."""
    commit(tmp_path, 1, data)
    spoil(tmp_path / "step-1.g1.a1" / SLICES)

    def read(exchange: Exchange) -> Any:
        rows = halves(exchange, data)
        found = restore(tmp_path, exchange, select=lambda _: rows)
        assert found.loaded is not None
        assert all(found.loaded.tensors[name] == data[name][begin:end] for name, (begin, end) in rows.items())
        return found.quarantined

    assert world(2, read) == [(), ()]


def test_flipped_bit_in_a_slice_is_found_and_falls_back_a_step(
    tmp_path: Path, commit: Callable[..., Any], data: dict[str, bytes]
) -> None:
    commit(tmp_path, 1, data)
    commit(tmp_path, 2, data)
    path = tmp_path / "step-2.g1.a1" / TENSORS
    with path.open("r+b") as file:
        file.seek(4096 + 1_000_000)
        byte = file.read(1)[0]
        file.seek(4096 + 1_000_000)
        file.write(bytes([byte ^ 4]))
    rows = dict.fromkeys(data, (999990, 1000100))
    found = restore(tmp_path, SingleRank(), select=lambda _: rows)
    assert found.step == 1
    assert [bad.path for bad in found.quarantined] == ["step-2.g1.a1"]
    assert "digest of chunk 0 differs, in bytes" in found.quarantined[0].reason


def test_a_slice_that_is_bad_in_one_copy_comes_from_another(
    tmp_path: Path, commit: Callable[..., Any], data: dict[str, bytes]
) -> None:
    stores = [FolderStore(tmp_path / "first"), FolderStore(tmp_path / "second")]
    commit(tmp_path / "first", 1, data)
    (tmp_path / "second").mkdir()
    name = "step-1.g1.a1"
    (tmp_path / "second" / name).mkdir()
    for path in (tmp_path / "first" / name).iterdir():
        (tmp_path / "second" / name / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "first" / name / TENSORS).open("r+b") as file:
        file.seek(4096 + 1_000_000)
        byte = file.read(1)[0]
        file.seek(4096 + 1_000_000)
        file.write(bytes([byte ^ 4]))
    (tmp_path / "second" / name / SLICES).unlink()  # the digests of one chunk are valid for the other
    rows = dict.fromkeys(data, (999990, 1000100))
    found = restore(stores, SingleRank(), select=lambda _: rows)
    assert found.loaded is not None
    assert all(found.loaded.tensors[tensor] == data[tensor][999_990:1_000_100] for tensor in data)
    assert [bad.path for bad in found.quarantined] == [name]
