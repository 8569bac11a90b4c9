"""Checkpoints that tests upload to a bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest, digest
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast_testbed.fakes.s3_faults import Fault, Request

SIZE = (8 << 20) + 12345  # two parts


@dataclass(frozen=True)
class Made:
    """A checkpoint in a folder."""

    store: FolderStore
    name: CheckpointName
    bytes: dict[str, bytes] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return self.store.manifest(self.name)


def upload(made: Made, target: ObjectStore) -> None:
    incoming = target.receive(made.name, digest(made.manifest))
    for file, record in made.manifest.files.items():
        assert incoming.write(file, [made.bytes[file]]) == record
    incoming.publish(made.manifest)


def whole(store: ObjectStore, name: CheckpointName, file: str) -> bytes:
    with store.open(name, file) as opened:
        data = bytearray(opened.nbytes)
        opened.read_into(0, memoryview(data))
    return bytes(data)


def is_whole(store: ObjectStore, made: Made) -> bool:
    assert store.commits() == (made.name,)
    assert store.manifest(made.name) == made.manifest
    return all(whole(store, made.name, file) == data for file, data in made.bytes.items())


def once(fault: Fault, matches: Callable[[Request], bool]) -> Callable[[Request], Fault | None]:
    """Return the fault for the first matching request only."""
    left = [fault]
    return lambda request: left.pop() if left and matches(request) else None


def by_signed_address(request: Request) -> bool:
    return "X-Amz-Signature" in request.target
