"""A buffer or a stream is written byte for byte with its digests on any file system. Errors name the file."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.checkpoint.io.direct_writer import ImageWriter, aligned
from holdfast.checkpoint.io.durable_files import write_file
from holdfast.checkpoint.io.fill_progress import Filling
from holdfast.checkpoint.io.huge_pages import address_of
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.io.staging_buffer import anonymous
from holdfast.core.errors import CheckpointError, PeerLostError

LENGTHS = [1, 4096, 4097, CHUNK_BYTES, 2 * CHUNK_BYTES + 3]
PIECE = 3_000_001
Write = Callable[[Path, memoryview, int], FileRecord]


def as_image(path: Path, image: memoryview, nbytes: int) -> FileRecord:
    return ImageWriter(path=path, image=image, nbytes=nbytes).run()


def as_stream(path: Path, image: memoryview, nbytes: int) -> FileRecord:
    return write_file(path, [image[at : min(at + PIECE, nbytes)] for at in range(0, nbytes, PIECE)])


either = pytest.mark.parametrize("write", [as_image, as_stream])


def image_of(nbytes: int) -> memoryview:
    image = anonymous(aligned(nbytes))
    image[:nbytes] = os.urandom(nbytes)
    return image


def holds(path: Path, data: memoryview, record: FileRecord) -> bool:
    """Return whether the file has these bytes and its record matches."""
    digest = xxhash.xxh3_128_hexdigest
    chunks = tuple(digest(data[at : at + CHUNK_BYTES]) for at in range(0, data.nbytes, CHUNK_BYTES))
    said = FileRecord(nbytes=data.nbytes, digest=digest(data), chunks=chunks)
    return record == said and path.read_bytes() == data


def set_flags_refused(fd: int, command: int, flags: int = 0) -> int:
    """Simulate a file system without O_DIRECT."""
    if command == fcntl.F_SETFL:
        raise OSError(errno.EINVAL, "Invalid argument")
    return 0


@either
@pytest.mark.parametrize("nbytes", [*LENGTHS, 9 * CHUNK_BYTES + 4095])
@pytest.mark.parametrize("direct", [True, False], ids=["past the cache", "through the cache"])
def test_the_file_is_what_was_given_and_its_record_verifies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write, nbytes: int, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(fcntl, "fcntl", set_flags_refused)
    image = image_of(nbytes)
    record = write(tmp_path / "file", image, nbytes)
    assert holds(tmp_path / "file", image[:nbytes], record)


def test_a_stream_of_nothing_is_an_empty_file(tmp_path: Path) -> None:
    assert holds(tmp_path / "file", memoryview(b""), write_file(tmp_path / "file", [b""]))


@either
def test_disk_refusing_direct_io_gets_the_same_bytes_via_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    pwrite = os.pwrite

    def refusing(fd: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(fd, data[: len(data) // 2 + 1], offset)  # and writes less than requested

    monkeypatch.setattr(os, "pwrite", refusing)
    image = image_of(CHUNK_BYTES + 5)
    record = write(tmp_path / "file", image, CHUNK_BYTES + 5)
    assert holds(tmp_path / "file", image[: CHUNK_BYTES + 5], record)


@either
@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate"])
@pytest.mark.parametrize("trouble", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_what_the_disk_refuses_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write, call: str, trouble: int
) -> None:
    def failing(*arguments: Any) -> int:
        raise OSError(trouble, os.strerror(trouble))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match="rank-3") as raised:
        write(tmp_path / "rank-3", image_of(6 * CHUNK_BYTES + 1), 6 * CHUNK_BYTES + 1)
    assert raised.value.errno == trouble
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-writer")]


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_exactly_the_requested_number_of_writes_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: int
) -> None:
    pwrite, all_there, now, most = os.pwrite, threading.Barrier(writers), [0], [0]
    lock = threading.Lock()

    def counted(fd: int, data: Any, offset: int) -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        all_there.wait(timeout=240)
        with lock:
            now[0] -= 1
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    nbytes = 4 * CHUNK_BYTES
    image = image_of(nbytes)
    record = ImageWriter(path=tmp_path / "file", image=image, nbytes=nbytes, pace=Pace(None, writers)).run()
    assert holds(tmp_path / "file", image, record)
    assert most == [writers]


def test_forked_process_does_not_share_or_corrupt_the_buffer(tmp_path: Path) -> None:
    """The workers of a data loader are such processes. The pages stay with the parent."""
    image = image_of(CHUNK_BYTES)
    child = os.fork()
    if child == 0:
        try:
            del image
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert holds(tmp_path / "file", image, ImageWriter(path=tmp_path / "file", image=image, nbytes=CHUNK_BYTES).run())
    (flags,) = [flags for begin, end, flags in mappings() if begin <= address_of(image) < end]
    assert "dc" in flags  # do not copy on fork


def mappings() -> list[tuple[int, int, list[str]]]:
    """Return the start, end and flags of each memory mapping of this process."""
    found, begin, end = [], 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            begin, end = (int(edge, 16) for edge in first.split("-"))
        elif first == "VmFlags:":
            found.append((begin, end, line.split()[1:]))
    return found


def test_a_file_that_is_given_up_ends_at_once(tmp_path: Path) -> None:
    def over() -> None:
        raise PeerLostError("the attempt is over")

    with pytest.raises(PeerLostError):
        ImageWriter(path=tmp_path / "file", image=image_of(3 * CHUNK_BYTES), nbytes=3 * CHUNK_BYTES, check=over).run()
    assert (tmp_path / "file").stat().st_size == 0


def test_filled_parts_are_written_while_others_are_pending(tmp_path: Path) -> None:
    nbytes = 3 * CHUNK_BYTES + 17
    data, image, filling = image_of(nbytes), anonymous(aligned(nbytes)), Filling()
    records: list[FileRecord] = []
    thread = threading.Thread(
        target=lambda: records.append(
            ImageWriter(path=tmp_path / "file", image=image, nbytes=nbytes, filling=filling).run()
        ),
        daemon=True,
    )
    thread.start()
    for upto in (CHUNK_BYTES + 1, 2 * CHUNK_BYTES):
        image[:upto] = data[:upto]
        filling.reach(upto)
        whole = upto // CHUNK_BYTES * CHUNK_BYTES
        wait_until(lambda whole=whole: written(tmp_path / "file")[:whole] == data[:whole])
    assert records == []
    image[:] = data
    filling.reach(nbytes)
    thread.join(240)
    assert holds(tmp_path / "file", data[:nbytes], records[0])


def written(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_part_that_is_never_filled_is_an_error_and_blocks_nobody(tmp_path: Path) -> None:
    filling = Filling()
    filling.reach(CHUNK_BYTES)
    filling.fail("the state is gone")
    with pytest.raises(CheckpointError, match="the state is gone"):
        ImageWriter(
            path=tmp_path / "file", image=image_of(3 * CHUNK_BYTES), nbytes=3 * CHUNK_BYTES, filling=filling
        ).run()


def test_a_large_commit_by_several_ranks_reads_back_whole(
    tmp_path: Path, world: Callable[..., Any], commit_by: Callable[..., Any], content: Callable[..., Any]
) -> None:
    from holdfast.checkpoint.ranks.exchange import SingleRank
    from holdfast.checkpoint.restore.search import restore

    tensors = {"large": os.urandom(3 * CHUNK_BYTES + 17), "small": b"x" * 100}
    assert all(r.committed for r in world(2, lambda exchange: commit_by(exchange, tmp_path, 5, tensors)))
    loaded = restore(tmp_path, SingleRank(), job_uid="job-1").loaded
    assert content(loaded) == tensors
