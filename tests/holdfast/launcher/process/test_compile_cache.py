"""A half-written library in the compile cache is removed. Complete and unfinished ones in use stay."""

from __future__ import annotations

import _ctypes
from pathlib import Path

import pytest
from filelock import FileLock
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from holdfast.launcher.process.compile_cache import folder, repair

LIBRARY = Path(_ctypes.__file__).read_bytes()  # as written by a linker
KEY = "cab3hjkl"


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """The result of a killed linker: space for the complete file, and only a part of its content."""
    (tmp_path / "ab").mkdir()
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / f"{KEY}.lock").touch()
    file = tmp_path / "ab" / f"{KEY}.main.so"
    file.write_bytes(LIBRARY[: len(LIBRARY) // 2])
    return file


@pytest.mark.parametrize("content", [b"", LIBRARY[:100], LIBRARY[:-1], bytes(len(LIBRARY))])
def test_an_incomplete_library_is_removed(half: Path, tmp_path: Path, content: bytes) -> None:
    half.write_bytes(content)
    assert repair(tmp_path) == [half]
    assert not half.exists()


def test_complete_libraries_and_other_kinds_of_files_are_kept(half: Path, tmp_path: Path) -> None:
    half.write_bytes(LIBRARY)
    others = [tmp_path / "ab" / f"{KEY}.main.cpp", tmp_path / "ab" / f"{KEY}.py", tmp_path / "locks" / "cab.so"]
    for other in others:
        other.touch()
    assert repair(tmp_path) == []
    assert all(file.exists() for file in (half, *others))


def test_what_a_compiler_is_writing_is_left_alone(half: Path, tmp_path: Path) -> None:
    with FileLock(tmp_path / "locks" / f"{KEY}.lock"):
        assert repair(tmp_path) == []
    assert repair(tmp_path) == [half]


def test_the_cache_is_where_torch_keeps_it(tmp_path: Path) -> None:
    assert folder({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}) == tmp_path
    assert folder({}) == Path(default_cache_dir())
    assert repair(tmp_path / "missing") == []
