"""Inputs that an attacker may have written, and functions that read them."""

from __future__ import annotations

import copy
import io
import json
import logging
import threading
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import xxhash
from mutations import altered, little_memory, mutated, told_apart
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from holdfast import HoldfastError
from holdfast.checkpoint.format.file_names import CheckpointName, tensors_file
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import Chunk, TensorRecord
from holdfast.checkpoint.format.shard_layout import TensorSpec, plan_shard, whole
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.stores.memory.slots import SlotSet
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.cli.checkpoints.formats import import_weights
from holdfast.cli.checkpoints.formats.detect import read_source
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.attempt import AttemptId, Claim

KEY = b"k" * 32


NAME = CheckpointName(step=7, attempt_id=AttemptId(1, 1))


TENSORS = tensors_file(0)


Changes = list[Any]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Assert that no file is changed, removed or added."""
    before = tree(folder)
    yield
    assert tree(folder) == before


def outcome(act: Callable[[], str]) -> str:
    """Return the error of the package and its place. Any other error is a bug, and is raised."""
    try:
        return act()
    except HoldfastError as error:
        first: BaseException = error
        while isinstance(first.__cause__, HoldfastError):
            first = first.__cause__
        cause = "" if first.__cause__ is None else f", {type(first.__cause__).__name__}"
        return f"{type(error).__name__}: {place(first)}{cause}"


def place(error: BaseException) -> str:
    """Return the function of the package that raised the error."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = [code for code in frames if "/src/holdfast/" in code.co_filename][-1]
    return f"{Path(last.co_filename).stem}.{last.co_name}"


def of_json(document: Any, changes: Changes) -> bytes:
    """Change a document at some places, and then the encoded bytes at others."""
    values, edits = told_apart(changes)
    return altered(json.dumps(mutated(copy.deepcopy(document), values)).encode(), edits)


# Claims

CLAIM = Claim(
    attempt_id=AttemptId(1, 2), job_uid="job", publication="p", from_step=30, from_attempt_id=AttemptId(1, 1)
)


# Slots in memory

BODY = bytes(range(256)) * 8


@cache
def slot() -> bytes:
    """Return the start of a slot with a checkpoint. Zeros follow it."""
    with TemporaryDirectory() as folder:
        plan = plan_shard([whole(TensorSpec(name="x", dtype="U8", shape=(len(BODY),)))], metadata={})
        slots = SlotSet(Path(folder), "own-0")
        writer = slots.begin(NAME, 4 * 4096, keep=(), job="job")
        record = writer.write(TENSORS, [plan.header, BODY], plan.nbytes)
        own = writer.write("rank-0.json", [b"{}"], 2)
        writer.stage()
        chunk = Chunk(file=TENSORS, offset=plan.offsets[0], nbytes=len(BODY), start=(0,), shape=(len(BODY),))
        writer.seal(
            Manifest(
                step=NAME.step,
                attempt_id=NAME.attempt_id,
                job_uid="job",
                publication="p",
                run_id="r",
                created="",
                world_size=1,
                mesh={"data": 1},
                tensors={"x": TensorRecord(dtype="U8", shape=(len(BODY),), chunks=(chunk,))},
                files={TENSORS: record, "rank-0.json": own},
                state={"objects": {}, "counters": {}},
                data=None,
                numerics={},
            )
        )
        slots.close()
        (path,) = (path for path in Path(folder).glob("*.slot-0"))
        return path.read_bytes().rstrip(b"\0").ljust(6 * 4096, b"\0")


def resealed(raw: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Replace the current table of a slot by another one under a valid seal."""
    sequence = int.from_bytes(raw[:8], "little")
    at = (1024, 2048)[sequence // 2 % 2]
    length = int.from_bytes(raw[at : at + 8], "little")
    table = change(raw[at + 24 : at + 24 + length])
    seal = xxhash.xxh3_128_digest(table + sequence.to_bytes(8, "little"))
    new = len(table).to_bytes(8, "little") + seal + table
    return raw[:at] + new + raw[at + len(new) :]


def table(folder: Path, changes: Changes) -> str:
    return slot_of(folder, resealed(slot(), lambda raw: of_json(json.loads(raw), changes)[:1000]))


def slot_of(folder: Path, raw: bytes) -> str:
    (folder / "own-0.slot-0").write_bytes(raw)
    store = MemoryStore(folder, {"job"})

    def act() -> str:
        commits, said = store.commits(), []
        for name in commits:
            said.append(f"{store.manifest(name).step}")
            with store.open(name, TENSORS) as source:
                source.read_into(0, memoryview(bytearray(min(source.nbytes, 1 << 20))))
        loaded = restore([store], SingleRank(), job_uid="job").loaded
        assert loaded is None or bytes(loaded.tensors["x"]) == BODY
        return f"{'restored' if loaded else 'not restored'}: of {len(commits)}"

    with little_memory():
        said = outcome(act)
    (left,) = tree(folder).values()
    assert left[4096:] == raw[4096:], "of a slot nothing is written but that it is void"
    return said


def framed(message: Any) -> bytes:
    raw = message if isinstance(message, bytes) else json.dumps(message).encode()
    return len(raw).to_bytes(4, "big") + raw


@contextmanager
def server(folder: Path) -> Iterator[tuple[PeerServer, list[logging.LogRecord]]]:
    """A server whose threads must end normally. It logs how connections ended."""
    raised: list[Any] = []
    hook, threading.excepthook = threading.excepthook, raised.append
    ended: list[logging.LogRecord] = []
    log, logs = logging.getLogger("holdfast.checkpoint.peer"), logging.Handler()
    logs.emit = ended.append  # type: ignore[method-assign]
    level = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(logs)
    served = PeerServer(folder, host="127.0.0.1", limit=8 << 20)
    served.key = KEY
    try:
        yield served, ended
    finally:
        served.close()
        log.removeHandler(logs)
        log.setLevel(level)
        threading.excepthook = hook
    assert not raised, raised


def neighbour(port: int) -> Neighbour:
    return Neighbour(node="n", pod="p", host="127.0.0.1", port=port)


# Files of other formats

WEIGHTS_OF = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@cache
def sources() -> dict[str, dict[str, bytes]]:
    """A small source of each format, with its files."""
    with TemporaryDirectory() as text, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(text)
        made = {name: folder / name for name in ("pt", "bin", "safetensors", "index", "dcp")}
        for one in made.values():
            one.mkdir()
        state = {"model": WEIGHTS_OF, "step": 3, "note": (b"x", [1.5, None])}
        torch.save(state, made["pt"] / "w.pt")
        torch.save(state, made["bin"] / "w.bin", _use_new_zipfile_serialization=False)
        save_file(WEIGHTS_OF, made["safetensors"] / "w.safetensors")
        save_file(WEIGHTS_OF, made["index"] / "w.safetensors")
        index = {"weight_map": dict.fromkeys(WEIGHTS_OF, "w.safetensors")}
        (made["index"] / "model.safetensors.index.json").write_text(json.dumps(index))
        dcp.save({"model": WEIGHTS_OF, "step": 3}, checkpoint_id=made["dcp"], no_dist=True)
        return {name: tree(one) for name, one in made.items()}


def zipped(raw: bytes, name: str, change: Callable[[bytes], bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    """Replace the part of this name in a file of torch.save, with its valid checksum."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(target, "w", kind) as new:
        for part in old.namelist():
            new.writestr(part, change(old.read(part)) if part.endswith(name) else old.read(part))
    return target.getvalue()


def converted(folder: Path, files: dict[str, bytes], name: str = "") -> str:
    """Return the result of `holdfast checkpoints convert`: a complete checkpoint, or nothing."""
    source, target = folder / "in", folder / "out"
    for file, data in files.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes(data)

    def act() -> str:
        found = read_source(source / name if name else source)
        made = import_weights.commit(
            FolderStore(target), import_weights.objects(found, name="all", split=False), step=1, made=NOW
        )
        assert verify(FolderStore(target), made).verified
        return "converted"

    with untouched(source), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = outcome(act)
    assert target.exists() == (said == "converted")
    return said


NOW = datetime(2026, 1, 31, tzinfo=UTC)


def index(folder: Path, changes: Changes) -> str:
    files = sources()["index"]
    (name,) = (name for name in files if name.endswith(".json"))
    return converted(folder, {**files, name: of_json(json.loads(files[name]), changes)})
