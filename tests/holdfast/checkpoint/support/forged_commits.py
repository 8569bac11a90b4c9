"""Forged checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from mutations import little_memory

from holdfast import checkpoint
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.verify import Verification, verify

Json = Any


NEWEST = "step-20.g0.a1"


TENSORS = "rank-0.safetensors"


def objects(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}


def sealed(document: Json) -> bytes:
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return body[:-1] + f',"manifestDigest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def forge(root: Path, change: Callable[[Json], Any]) -> None:
    """Change the newest manifest and seal it again."""
    path = root / NEWEST / "MANIFEST.json"
    document = json.loads(path.read_bytes())
    del document["manifestDigest"]
    change(document)
    path.write_bytes(sealed(document))


def replace_file(root: Path, data: bytes, name: str = TENSORS) -> None:
    """Replace a file, with valid digests in the manifest."""
    (root / NEWEST / name).write_bytes(data)
    parts = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    record = {
        "bytes": len(data),
        "digest": xxhash.xxh3_128_hexdigest(data),
        "chunks": [xxhash.xxh3_128_hexdigest(part) for part in parts],
    }
    forge(root, lambda document: document["files"].update({name: record}))


def reheaded(root: Path, change: Callable[[Json], Any]) -> bytes:
    """Replace the header of the newest checkpoint's tensors by one of the same length."""
    raw = (root / NEWEST / TENSORS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    return raw[:8] + json.dumps(header).encode().ljust(length) + raw[8 + length :]


def outside(root: Path) -> dict[str, bytes]:
    """Return everything around the tier, and in the tier except for the checkpoints and the quarantine."""
    files = [path for path in root.parent.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        str(path.relative_to(root.parent)): path.read_bytes()
        for path in files
        if "quarantine" not in path.parts and NEWEST not in path.parts
    }


def falls_back(root: Path, why: str) -> None:
    """Assert that the newest checkpoint is refused for this reason, and step 10 is restored."""
    around = outside(root)
    fresh = objects(0.0)
    with little_memory():
        found = checkpoint.load(root, **fresh)
    assert found is not None
    assert found.step == 10
    assert why in found.quarantined[0].reason
    assert float(fresh["model"].weight.detach()[0, 0]) == 10.0
    assert outside(root) == around


def verdict(root: Path) -> Verification:
    """Return the output of `holdfast checkpoints verify` for the newest checkpoint."""
    store = FolderStore(root)
    return verify(store, max(store.commits(), key=lambda name: name.step))


def setter(path: str, value: Json) -> Callable[[Json], None]:
    """Return a function that sets the value at `a/b/0/c`."""

    def change(document: Json) -> None:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("|")]
        for part in parents:
            document = document[part]
        document[last] = value

    return change
