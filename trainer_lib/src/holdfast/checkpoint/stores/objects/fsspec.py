"""Any fsspec file system as a store, which needs only reads and writes. No torch.

fsspec offers fewer guarantees than a folder or S3. No exclusive creation works on all its file systems. A manifest or
claim is checked for existence, written, and read back. If two writers do so at the same time, the last one wins. The
other one reads the winner's bytes and reports it. In addition, fsspec compares no checksums in transit. Lengths are
compared after each file, and every byte is verified on a read. Interrupted uploads do not resume.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.stores.objects.bucket import IN_FLIGHT, Stat, check_small, create_by_looking
from holdfast.checkpoint.stores.objects.errors import ADVICE, Kind
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UnavailableError, UsageError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def fsspec_store(url: str, in_flight: int = IN_FLIGHT) -> ObjectStore:
    return ObjectStore(FsspecBucket(url, in_flight))


def without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")).rstrip("/")


class FsspecBucket:
    """A folder of an fsspec file system."""

    part_bytes = 2 * CHUNK_BYTES
    lacks: tuple[str, ...] = ()

    def __init__(self, url: str, in_flight: int) -> None:
        self.in_flight = in_flight
        self.url = without_credentials(url)
        self._fs, root = _file_system(url, self.url)
        self._root = root.rstrip("/")

    def folders(self, prefix: str) -> list[str]:
        with self._reaching(prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(prefix), detail=True)
            except FileNotFoundError:
                return []
        return sorted(_last(entry["name"]) for entry in found if entry["type"] == "directory")

    def keys(self, prefix: str) -> list[str]:
        with self._reaching(prefix):
            self._fs.invalidate_cache()
            found: list[str] = self._fs.find(self._path(prefix))
        strip = len(self._root.lstrip("/"))
        return sorted(path.lstrip("/")[strip:].lstrip("/") for path in found)

    def stat(self, key: str) -> Stat:
        """Return the length, and the file system's tag or time."""
        with self._reaching(key):
            self._fs.invalidate_cache()
            found = self._fs.info(self._path(key))
        tag = next((found[name] for name in ("ETag", "etag", "mtime", "created") if name in found), "")
        return Stat(nbytes=int(found["size"]), tag=str(tag))

    def read(self, key: str, most: int) -> bytes:
        check_small(key, self.stat(key).nbytes, most)
        with self._reaching(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def read_into(self, key: str, stat: Stat, offset: int, target: memoryview) -> None:
        with self._reaching(key):
            data = self._fs.cat_file(self._path(key), start=offset, end=offset + target.nbytes)
        if len(data) != target.nbytes:
            raise CorruptCheckpointError(f"{_last(key)} ended while it was read")
        target[:] = data

    def create(self, key: str, data: bytes) -> bool:
        return create_by_looking(self, key, data)

    def put(self, key: str, data: bytes) -> None:
        self.upload(key, [memoryview(data)] if data else [])

    def upload(self, key: str, blocks: Iterable[memoryview]) -> None:
        """Write a file, and compare its length."""
        path, nbytes = self._path(key), 0
        with self._reaching(key):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._fs.open(path, "wb") as file:
                for block in blocks:
                    file.write(block)
                    nbytes += block.nbytes
        stored = self.stat(key).nbytes
        if stored != nbytes:
            raise UnavailableError(
                f"{self.url}/{key}: {nbytes} bytes were written, but the store has {stored}", cause=Kind.SERVER
            )

    def copy(self, source: str, target: str) -> None:
        path = self._path(target)
        with self._reaching(source):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.cp_file(self._path(source), path)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files, and then empty folders."""
        with self._reaching(", ".join(keys[:1])):
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(key))
        for folder in {self._path(key).rpartition("/")[0] for key in keys}:
            with contextlib.suppress(OSError, NotImplementedError):
                self._fs.rmdir(folder)

    def unfinished(self, prefix: str) -> list[str]:
        """Return nothing: fsspec cannot list unfinished uploads."""
        return []

    def abandon(self, prefix: str) -> None:
        """Do nothing: fsspec cannot abort unfinished uploads."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    @contextlib.contextmanager
    def _reaching(self, key: str) -> Iterator[None]:
        """Translate errors. File systems differ, and only a missing file counts as lost data."""
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{_last(key)} is missing") from error
        except Exception as error:
            kind = _kind(error)
            text = f"{type(error).__name__}: {error}"
            raise UnavailableError(
                f"{self.url}/{key}: {ADVICE[kind]} ({text}); the state of the store is unknown", cause=kind
            ) from error


def _kind(error: Exception) -> Kind:
    if isinstance(error, PermissionError):
        return Kind.DENIED
    if isinstance(error, OSError) and error.errno in _FULL:
        return Kind.FULL
    return Kind.NETWORK if isinstance(error, OSError) else Kind.REFUSED


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _file_system(url: str, shown: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(f"{shown} needs fsspec, which is not installed: pip install fsspec") from error
    try:
        fs, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{shown}: fsspec cannot open it: {error}") from error
    except (TypeError, AttributeError) as error:  # the URL lacks arguments of this file system
        raise UsageError(f"{shown} lacks what this file system of fsspec requires: {error}") from error
    return fs, str(root)
