"""The output of `ls` and `show`: JSON for scripts, tables for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.restore.lossy_delta import inexactness
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.cli.checkpoints.access.commit_reader import nbytes, tensor_bytes
from holdfast.cli.checkpoints.access.locate import fenced, read_manifest
from holdfast.cli.checkpoints.access.node_store import NodeFolderStore
from holdfast.core.errors import CorruptCheckpointError, UnknownFormatError
from holdfast.core.settings import format_size

Row = dict[str, Any]


def listed(store: CheckpointStore, names: Sequence[CheckpointName]) -> list[Row]:
    """Return a row per checkpoint. The `note` of an unusable one gives the reason."""
    claims = store.claims()
    lines = [_row(store, name, fenced(store, name, claims)) for name in names]
    left = {str(name) for name in store.commits()} if any(line["state"] == "damaged" for line in lines) else set()
    return [line for line in lines if line["state"] != "damaged" or line["commit"] in left]


def _row(store: CheckpointStore, name: CheckpointName, fence: str) -> Row:
    line: Row = {"step": name.step, "commit": str(name)}
    try:
        manifest = store.manifest(name)
    except CorruptCheckpointError as error:
        return {**line, "state": "damaged", "note": str(error)}
    except UnknownFormatError as error:
        return {**line, "state": "unknown", "note": str(error)}
    return {
        **line,
        "state": "fenced" if fence else "readable",
        "created": manifest.created,
        "ranks": manifest.world_size,
        "tensors": len(manifest.tensors),
        "bytes": nbytes(manifest),
        "parent": manifest.parent,
        "note": fence or _local_part(store, name, manifest),
    }


def _local_part(store: CheckpointStore, name: CheckpointName, manifest: Manifest) -> str:
    """Return a note if a node-local tier has only a part of the checkpoint."""
    if not isinstance(store, NodeFolderStore) or len(here := store.here(name, manifest.files)) == len(manifest.files):
        return ""
    return f"{len(here)} of {len(manifest.files)} files are here"


def table(lines: Sequence[Row]) -> str:
    """Return the table of `ls`."""
    head = ("STEP", "CHECKPOINT", "CREATED", "RANKS", "TENSORS", "SIZE", "STATE")
    return aligned([head, *map(_cells, lines)], right=(0, 3, 4, 5))


def _cells(line: Row) -> tuple[str, ...]:
    return (
        str(line["step"]),
        line["commit"],
        line.get("created", "")[:19],
        str(line.get("ranks", "")),
        str(line.get("tensors", "")),
        format_size(line["bytes"]) if "bytes" in line else "",
        ": ".join(filter(None, (line["state"], line["note"]))),
    )


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows in aligned columns; the last column is unchanged."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        for index in right:
            padded[index] = row[index].rjust(widths[index])
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def shown(store: CheckpointStore, name: CheckpointName) -> Row:
    """Return everything that the manifest contains."""
    manifest = read_manifest(store, name)
    return {
        "commit": str(name),
        "tier": store.url,
        "step": manifest.step,
        "generation": manifest.attempt_id.generation,
        "attempt": manifest.attempt_id.attempt,
        "created": manifest.created,
        "jobUID": manifest.job_uid,
        "runID": manifest.run_id,
        "world": {"size": manifest.world_size, "mesh": dict(manifest.mesh)},
        "parent": manifest.parent,
        "standsOn": sorted(manifest.depends_on),
        "inexact": inexactness(manifest),
        "bytes": nbytes(manifest),
        "files": {file: record.nbytes for file, record in sorted(manifest.own.items())},
        "objects": sorted(manifest.state["objects"]) if _has_objects(manifest) else [],
        "numerics": dict(manifest.numerics),
        "fence": fenced(store, name, store.claims()),
        "part": _local_part(store, name, manifest),
        "tensors": [
            {
                "name": tensor,
                "dtype": record.dtype,
                "shape": list(record.shape),
                "bytes": tensor_bytes(record),
                **({} if record.bound is None else {"bound": record.bound}),
            }
            for tensor, record in sorted(manifest.tensors.items())
        ],
    }


def _has_objects(manifest: Manifest) -> bool:
    return isinstance(manifest.state, dict) and isinstance(manifest.state.get("objects"), dict)


def page(commit: Row) -> str:
    """Return the text of `show`."""
    world = commit["world"]
    mesh = ", ".join(f"{name} {count}" for name, count in world["mesh"].items())
    head = [
        ("checkpoint", commit["commit"]),
        ("tier", commit["tier"]),
        ("step", str(commit["step"])),
        ("created", f"{commit['created']} by generation {commit['generation']}, attempt {commit['attempt']}"),
        ("job", f"{commit['jobUID'] or 'none'}, run {commit['runID'] or 'none'}"),
        ("world", f"{world['size']} ranks" + (f" ({mesh})" if mesh else "")),
        ("parent", commit["parent"] or "none (full checkpoint)"),
        *([("depends on", ", ".join(commit["standsOn"]))] if commit["standsOn"] else []),
        *([("not exact", commit["inexact"])] if commit["inexact"] else []),
        ("size", f"{format_size(commit['bytes'])} in {len(commit['files'])} files"),
        ("objects", ", ".join(commit["objects"]) or "none"),
        *([("part", commit["part"])] if commit["part"] else []),
        *([("fenced", commit["fence"])] if commit["fence"] else []),
    ]
    rows = [("TENSOR", "DTYPE", "SHAPE", "SIZE")]
    for tensor in commit["tensors"]:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        rows.append((tensor["name"], tensor["dtype"], shape, format_size(tensor["bytes"])))
    return f"{aligned(head)}\n\n{aligned(rows, right=(3,))}"
