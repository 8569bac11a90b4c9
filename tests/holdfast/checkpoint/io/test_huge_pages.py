"""New buffers use the expected pages and addresses, and the bytes read into them do not depend on that."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint.io import huge_pages
from holdfast.checkpoint.io.huge_pages import PAGE, Ahead, address_of, allocate, fault_in

MIB = 1 << 20
needs_large_pages = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages here")


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 12_345])
@pytest.mark.parametrize("nbytes", [1, 4096, 2 * MIB, 5 * MIB + 3])
def test_memory_lies_to_its_page_as_the_file_does(offset: int, nbytes: int) -> None:
    view = allocate(nbytes, offset=offset)
    assert address_of(view) % PAGE == offset % PAGE
    assert view.nbytes == nbytes
    assert not any(view[:: max(1, nbytes // 64)])


@needs_large_pages
def test_large_pages_are_asked_for_where_whole_ones_fit() -> None:
    view = allocate(5 * MIB)
    assert "hg" in flags_at(address_of(view))
    assert "hg" not in flags_at(address_of(view) + 4 * MIB)  # the last huge page would be a fifth full
    assert "hg" not in flags_at(address_of(allocate(MIB)))


def test_pages_are_there_once_they_were_fetched() -> None:
    view = allocate(5 * MIB)
    before = resident()
    fault_in(view)
    assert resident() - before >= 4 * MIB


@needs_large_pages
def test_small_pages_are_asked_for_once_large_ones_come_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))  # each check a second after the previous one
    views = [allocate(16 * MIB), allocate(4 * MIB)]
    ahead = Ahead(told(views))
    with ahead:
        ahead._thread.join(30)
    assert not ahead.large
    assert "hg" in flags_at(address_of(views[0]))
    assert "nh" in flags_at(address_of(views[0]) + 8 * MIB)
    assert "nh" in flags_at(address_of(views[1]))


def told(views: list[memoryview]) -> Iterator[memoryview]:
    yield from views


def test_who_leaves_early_waits_for_one_piece_at_most() -> None:
    views = [allocate(8 * MIB) for _ in range(100)]
    with Ahead(views):
        pass
    assert not any(view[0] for view in views)


@pytest.mark.parametrize("slow", [False, True], ids=["into large pages", "into small ones"])
def test_what_is_restored_is_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    if slow:
        monkeypatch.setattr(huge_pages, "_SLOW", -1.0)
    model = torch.nn.Linear(1500, 5000)
    checkpoint.save(tmp_path, step=1, model=model, more=torch.nn.Linear(700, 1100))
    other = torch.nn.Linear(1500, 5000)
    assert checkpoint.load(tmp_path, model=other) is not None
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def flags_at(address: int) -> list[str]:
    """Return the flags of the mapping with this address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            begin, end = (int(edge, 16) for edge in first.split("-"))
            here = begin <= address < end
        elif here and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no such mapping")


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
