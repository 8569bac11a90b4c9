"""Imports weights of another format into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

from holdfast.checkpoint.format.coverage import check
from holdfast.checkpoint.format.file_names import CheckpointName, step_number, tensors_file
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import Chunk, TensorRecord
from holdfast.checkpoint.format.shard_layout import ShardPlan, plan_shard, whole
from holdfast.checkpoint.io.durable_files import Buffer
from holdfast.checkpoint.state.flatten import Flat, flatten_values
from holdfast.checkpoint.stores.base import Target
from holdfast.cli.checkpoints.access.progress_bar import Progress, progress
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, UnknownFormatError, UsageError

WHOLE: Final = "model"
_BLOCK: Final = 8 << 20


def pick(found: Any, key: str) -> Any:
    """Return a part of the content by its key, for example `state_dict` or `module.model`."""
    for part in filter(None, key.split(".")):
        if not isinstance(found, Mapping) or part not in found:
            names = ", ".join(map(str, found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
            raise UsageError(f"--key {key}: no part {part!r}; expected one of {names}")
        found = found[part]
    return found


def objects(found: Any, *, name: str, split: bool) -> dict[str, Any]:
    """Return the state of each object: everything under one name, or each part under its own name."""
    if not isinstance(found, Mapping):
        raise UnknownFormatError(f"expected a state dict, but the content is a {type(found).__name__}")
    if not split:
        return {name: found}
    parts = {str(key): value for key, value in found.items()}
    if len(parts) != len(found):
        raise UsageError("--split: two keys have the same text, as 1 and '1' do: rename one of them")
    return parts


def stripped(states: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the states. If all names of a state begin with the prefix, it is removed."""
    if not prefix:
        return dict(states)
    wrapped = {name for name, state in states.items() if isinstance(state, Mapping) and _all_begin(state, prefix)}
    if not wrapped:
        first = next((key for state in states.values() if isinstance(state, Mapping) for key in state), "nothing")
        raise UsageError(
            f"--strip-prefix {prefix}: in no state dict do all names begin with it (the first name is "
            f"{first!r}): select the part with --key, or leave the option out"
        )
    return {
        name: {key.removeprefix(prefix): value for key, value in state.items()} if name in wrapped else state
        for name, state in states.items()
    }


def _all_begin(state: Mapping[Any, Any], prefix: str) -> bool:
    return bool(state) and all(isinstance(key, str) and key.startswith(prefix) and key != prefix for key in state)


def commit(store: Target, values: Mapping[str, Any], *, step: int, made: datetime) -> CheckpointName:
    """Create a checkpoint of these states, in the format that `holdfast.checkpoint.load` reads."""
    if store.claims():
        raise CheckpointError(f"{store.url} belongs to a job (it has claims): convert to another folder")
    step = step_number(step)
    older = [name.attempt_id.attempt for name in store.commits() if name.step == step]
    name = CheckpointName(step=step, attempt_id=AttemptId(0, 1 + max(older, default=0)))
    flat = flatten_values(values)
    plan = plan_shard(map(whole, flat.specs), metadata={"format": "pt", "commit": str(name), "rank": "0"})
    incoming = store.receive(name, uuid4().hex)  # the manifest is complete only after the write
    try:
        with progress("convert", plan.nbytes) as shown:
            record = incoming.write(tensors_file(0), _parts(plan, flat, shown))
        manifest = Manifest(
            step=step,
            attempt_id=name.attempt_id,
            job_uid="",
            publication="",
            run_id="",
            created=made.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            world_size=1,
            mesh={"data": 1},
            tensors=_records(plan),
            files={tensors_file(0): record},
            state={"objects": flat.tree, "counters": {}},
            data=None,
            numerics={},
        )
        check(manifest)
        incoming.publish(manifest)
    except BaseException:
        incoming.discard()
        raise
    return name


def _parts(plan: ShardPlan, flat: Flat, shown: Progress) -> Iterator[Buffer]:
    yield plan.header
    shown.add(len(plan.header))
    for piece in plan.pieces:
        data = memoryview(flat.read(piece)).cast("B")
        for begin in range(0, data.nbytes, _BLOCK):
            block = data[begin : begin + _BLOCK]
            yield block
            shown.add(block.nbytes)


def _records(plan: ShardPlan) -> dict[str, TensorRecord]:
    return {
        piece.spec.name: TensorRecord(
            dtype=piece.spec.dtype,
            shape=piece.spec.shape,
            chunks=(
                Chunk(file=tensors_file(0), offset=offset, nbytes=piece.nbytes, start=piece.start, shape=piece.shape),
            ),
        )
        for piece, offset in zip(plan.pieces, plan.offsets, strict=True)
    }
