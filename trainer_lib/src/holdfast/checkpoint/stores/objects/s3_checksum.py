"""The checksum that an S3 server compares. Pure.

With awscrt, it is CRC64NVME, also for the complete object. Otherwise, it is SHA-256 of each part.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

# Each block is digested and copied while it is in the CPU cache.
_IN_CACHE: Final = 256 << 10


class Checksum:
    """The checksum that the server compares: of each part, and of the complete object as the server stores it."""

    def __init__(self, *, crc: bool = True) -> None:
        """Create an empty checksum. `crc` selects CRC64NVME if awscrt is installed."""
        self._crc, self._combine = (_crc64nvme(), _combine_crc64nvme()) if crc else (None, None)
        self._whole = 0
        self._parts: list[bytes] = []

    @property
    def name(self) -> str:
        return "SHA256" if self._crc is None else "CRC64NVME"

    @property
    def field(self) -> str:
        """The request parameter for the checksum."""
        return f"Checksum{self.name}"

    @property
    def kind(self) -> Mapping[str, str]:
        """The parameter that requests a checksum of the complete object.

        With SHA-256, servers have only that of the parts.
        """
        return {} if self._crc is None else {"ChecksumType": "FULL_OBJECT"}

    def of(self, block: memoryview | bytes) -> str:
        return base64.b64encode(self._raw(block)).decode()

    def add(self, block: memoryview, copy: bytearray | None = None) -> str:
        """Add the next part of the object, and return its own checksum.

        `copy` receives its bytes at the same time.
        """
        raw = self._raw(block, copy)
        self._parts.append(raw)
        if self._crc is not None and self._combine is not None:
            self._whole = self._combine(self._whole, int.from_bytes(raw, "big"), block.nbytes)
        elif self._crc is not None:
            self._whole = self._crc(block, self._whole)
        return base64.b64encode(raw).decode()

    def whole(self) -> str:
        if self._crc is not None:
            return base64.b64encode(self._whole.to_bytes(8, "big")).decode()
        joined = base64.b64encode(hashlib.sha256(b"".join(self._parts)).digest()).decode()
        return f"{joined}-{len(self._parts)}"

    def _raw(self, block: memoryview | bytes, copy: bytearray | None = None) -> bytes:
        sha256, crc = hashlib.sha256(), 0
        source = memoryview(block)
        for begin in range(0, source.nbytes, _IN_CACHE):
            piece = source[begin : begin + _IN_CACHE]
            if self._crc is None:
                sha256.update(piece)
            else:
                crc = self._crc(piece, crc)
            if copy is not None:
                copy[begin : begin + piece.nbytes] = piece
        return sha256.digest() if self._crc is None else crc.to_bytes(8, "big")


def _crc64nvme() -> Callable[[Any, int], int] | None:
    try:
        from awscrt import checksums
    except ImportError:
        return None
    crc: Callable[[Any, int], int] = checksums.crc64nvme
    return crc


def _combine_crc64nvme() -> Callable[[int, int, int], int] | None:
    """Return the function that combines the checksums of two blocks; earlier releases of awscrt lack it."""
    try:
        from awscrt import checksums
    except ImportError:
        return None
    return getattr(checksums, "combine_crc64nvme", None)
