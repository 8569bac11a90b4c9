"""What others may have written, and what a connection may bring, made to do harm: claims, tables of slots in memory,
digests of slices, both sides of the protocol between launchers, files of other formats.

Each is taken right or refused with an error of the package's own, whatever it claims: little memory is taken, nothing
is written, no code of a pickle is run. The corpus is replayed first. Commits are in `test_bad_commits.py`.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import pickle
import re
import socket
import threading
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from mutations import CHANGES, CORPUS, EDITS, FUZZ, altered, little_memory, mutated, told_apart
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from holdfast import HoldfastError
from holdfast.checkpoint.folder import claims
from holdfast.checkpoint.format.file_names import CheckpointName, tensors_file
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import Chunk, TensorRecord
from holdfast.checkpoint.format.shard_layout import TensorSpec, plan_shard, whole
from holdfast.checkpoint.io.durable_files import encode_json
from holdfast.checkpoint.ranks.exchange import Alone
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.writer import save
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour, Peer, PeerStore, make_room
from holdfast.checkpoint.stores.memory.peer_protocol import Wire
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.stores.memory.slots import SlotSet
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.cli.checkpoints.formats import import_weights, memory_limit
from holdfast.cli.checkpoints.formats.detect import read_source
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.connections import proof
from holdfast.core.errors import CheckpointError, DamagedError

KEY = b"k" * 32
NAME = CheckpointName(step=7, pair=AttemptId(1, 1))
TENSORS = tensors_file(0)
Changes = list[Any]
Target = Callable[[Path, Changes], str]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Nothing there is changed, removed or added."""
    before = tree(folder)
    yield
    assert tree(folder) == before


def outcome(act: Callable[[], str]) -> str:
    """What came of it: an error of the package's own, and where from. Any other error is raised: a bug."""
    try:
        return act()
    except HoldfastError as error:
        first: BaseException = error
        while isinstance(first.__cause__, HoldfastError):
            first = first.__cause__
        cause = "" if first.__cause__ is None else f", {type(first.__cause__).__name__}"
        return f"{type(error).__name__}: {place(first)}{cause}"


def place(error: BaseException) -> str:
    """The function of the package that raised it."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = [code for code in frames if "/src/holdfast/" in code.co_filename][-1]
    return f"{Path(last.co_filename).stem}.{last.co_name}"


def of_json(document: Any, changes: Changes) -> bytes:
    """A document that is changed at some places, and then its bytes at others."""
    values, edits = told_apart(changes)
    return altered(json.dumps(mutated(copy.deepcopy(document), values)).encode(), edits)


# Claims

CLAIM = Claim(pair=AttemptId(1, 2), job_uid="job", publication="p", from_step=30, from_pair=AttemptId(1, 1))


def claim(folder: Path, changes: Changes) -> str:
    (folder / "claims").mkdir()
    (folder / "claims" / "1.2.json").write_bytes(of_json(CLAIM.to_json(), changes))

    def act() -> str:
        (found,) = claims.list_claims(folder)
        assert found.pair == CLAIM.pair
        assert Claim.from_json(found.to_json()) == found
        return "taken"

    with little_memory(), untouched(folder):
        return outcome(act)


# Slots in memory

BODY = bytes(range(256)) * 8


@cache
def slot() -> bytes:
    """The beginning of one that holds a commit; after it come zeros."""
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
                pair=NAME.pair,
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
    """Another table in the place of the one that counts, under a true seal."""
    sequence = int.from_bytes(raw[:8], "little")
    at = (1024, 2048)[sequence // 2 % 2]
    length = int.from_bytes(raw[at : at + 8], "little")
    table = change(raw[at + 24 : at + 24 + length])
    seal = xxhash.xxh3_128_digest(table + sequence.to_bytes(8, "little"))
    new = len(table).to_bytes(8, "little") + seal + table
    return raw[:at] + new + raw[at + len(new) :]


def table(folder: Path, changes: Changes) -> str:
    return slot_of(folder, resealed(slot(), lambda raw: of_json(json.loads(raw), changes)[:1000]))


def page(folder: Path, changes: Changes) -> str:
    """The bytes of a slot as they are, under whatever seal that leaves."""
    return slot_of(folder, altered(slot(), [(place % 3000, *rest) for place, *rest in told_apart(changes)[1]]))


def slot_of(folder: Path, raw: bytes) -> str:
    (folder / "own-0.slot-0").write_bytes(raw)
    store = MemoryStore(folder, {"job"})

    def act() -> str:
        commits, said = store.commits(), []
        for name in commits:
            said.append(f"{store.manifest(name).step}")
            with store.open(name, TENSORS) as source:
                source.read_into(0, memoryview(bytearray(min(source.nbytes, 1 << 20))))
        loaded = restore([store], Alone(), job_uid="job").loaded
        assert loaded is None or bytes(loaded.tensors["x"]) == BODY
        return f"{'restored' if loaded else 'not restored'}: of {len(commits)}"

    with little_memory():
        said = outcome(act)
    (left,) = tree(folder).values()
    assert left[4096:] == raw[4096:], "of a slot nothing is written but that it is void"
    return said


# Digests of slices

WEIGHTS = bytes(range(251)) * 2000


@cache
def sliced() -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        snapshot = Snapshot(
            name=NAME,
            specs=[TensorSpec(name="w", dtype="U8", shape=(len(WEIGHTS),))],
            read=lambda _: WEIGHTS,
            state={"objects": {}, "counters": {}},
            data=None,
            alone={},
            numerics={},
        )
        assert save(Path(folder), snapshot, Alone()).committed
        return tree(Path(folder) / str(NAME))


def slices(folder: Path, changes: Changes) -> str:
    """Those that are not as they were: passed over, or the commit is refused; no byte of it is taken for another."""
    values, edits = told_apart(changes)
    good = sliced()
    head, _, digests = good["rank-0.slices"].partition(b"\n")
    raw = altered(of_json(json.loads(head), values).replace(b" ", b"") + b"\n" + digests, edits)
    if changes[0][0] % 4:
        raw = raw[:-16] + xxhash.xxh3_128_digest(raw[:-16])
    (folder / str(NAME)).mkdir()
    for name, data in {**good, "rank-0.slices": raw}.items():
        (folder / str(NAME) / name).write_bytes(data)

    def act() -> str:
        found = restore(folder, Alone(), select=lambda _: {"w": (100, 70_000)})
        assert found.loaded is None or bytes(found.loaded.tensors["w"]) == WEIGHTS[100:70_000]
        return "restored" if found.loaded else "refused"

    with little_memory(), untouched(folder):
        return outcome(act)


# Between launchers

COPY = b"copied " * 100
RECORD = {
    "bytes": len(COPY),
    "digest": xxhash.xxh3_128_hexdigest(COPY),
    "chunks": [xxhash.xxh3_128_hexdigest(COPY)],
}
HERE = {"name": str(NAME), "jobs": ["job"]}
REQUESTS: list[dict[str, Any]] = [
    {"op": "list", "jobs": None},
    {"op": "manifest", **HERE},
    {"op": "open", **HERE, "file": TENSORS},
    {"op": "read", **HERE, "file": TENSORS, "offset": 8, "bytes": 16},
    {"op": "room", "name": str(NAME), "keep": [str(NAME)]},
    {
        "op": "put",
        "owner": "node-1",
        "job": "job",
        "name": "step-8.g1.a1",
        "keep": [],
        "files": {TENSORS: RECORD},
        "room": 9000,
    },
    {"op": "seal", "owner": "node-1", "name": "step-8.g1.a1", "manifest": "{}"},
]


def framed(message: Any) -> bytes:
    raw = message if isinstance(message, bytes) else json.dumps(message).encode()
    return len(raw).to_bytes(4, "big") + raw


@contextmanager
def server(folder: Path) -> Iterator[tuple[PeerServer, list[logging.LogRecord]]]:
    """One whose threads end only as they should, and what it logs of how connections ended."""
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


def requests(folder: Path, changes: Changes) -> str:
    """To a server, from one that holds the key: requests that are changed, and what follows them in other bytes."""
    values, edits = told_apart(changes)
    first = changes[0][0]
    request = mutated(copy.deepcopy(REQUESTS[first % len(REQUESTS)]), values)
    follows = COPY if isinstance(request, dict) and request.get("op") == "put" else b""
    said = said_to_server(folder, altered(framed(request) + follows, edits), known=True)
    return f"{said}, {REQUESTS[first % len(REQUESTS)]['op']}"


def greetings(folder: Path, changes: Changes) -> str:
    """To a server, from a stranger."""
    raw = of_json({"nonce": "0" * 32, "mac": "0" * 64}, changes)
    return said_to_server(folder, framed(raw) if changes[0][0] % 2 else raw, known=False)


def said_to_server(folder: Path, raw: bytes, *, known: bool) -> str:
    (folder / "own-0.slot-0").write_bytes(slot())
    with little_memory(), server(folder) as (served, ended):
        connection = socket.create_connection(("127.0.0.1", served.port))
        connection.settimeout(60)
        wire = Wire(connection, every=60)
        nonce = wire.receive()["nonce"]
        if known:
            wire.send({"nonce": "n", "mac": proof(KEY, "client", nonce, "n")})
            wire.receive()
        with suppress(OSError):  # it may have hung up already
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionError):  # reset: it had not read all that was sent
            while part := connection.recv(1 << 16):
                answer += part
        connection.close()
        assert PeerStore(Peer(neighbour(served.port), KEY), {"job"}).manifest(NAME).step == NAME.step
    others = {path.name for path in folder.iterdir()} - {"own-0.slot-0"}
    assert all(re.fullmatch(r"for-[a-z0-9-]+\.(lock|slot-[01])", name) for name in others)
    assert (folder / "own-0.slot-0").read_bytes() == slot()
    if not answer:
        return f"hung up: {next((type(record.args[0]).__name__ for record in ended if record.args), '')}"
    return f"{', '.join(sorted(json.loads(answer[4 : 4 + int.from_bytes(answer[:4], 'big')])))}: answered"


ANSWERS: dict[str, Any] = {
    "greeting": {"nonce": "0" * 32},
    "proof": {},
    "list": {"commits": [str(NAME)]},
    "manifest": {"manifest": "{}"},
    "open": {"bytes": 16},
    "room": {"bytes": 16},
    "begun": {},
    "read": {},
}


def answers(folder: Path, changes: Changes) -> str:
    """To a client, from one that holds the key and answers in its own way; or from one that does not hold it."""
    values, edits = told_apart(changes)
    wanted = sorted(ANSWERS)[changes[0][0] % len(ANSWERS)]
    changed = mutated({wanted: copy.deepcopy(ANSWERS[wanted])}, values) if values else ANSWERS
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        said = {**ANSWERS, **changed}
        thread = threading.Thread(target=answers_by, args=(listening, said, wanted, edits))
        thread.start()
        try:
            with little_memory(), untouched(folder):
                return outcome(lambda: asked(neighbour(listening.getsockname()[1]), wanted))
        finally:
            thread.join()


def asked(where: Neighbour, wanted: str) -> str:
    peer = Peer(where, KEY)
    store = PeerStore(peer, {"job"})
    try:
        match wanted:
            case "list":
                return f"commits: {len(store.commits())}"
            case "manifest":
                return f"manifest: {store.manifest(NAME).step}"
            case "room":
                return f"room: {make_room(peer, NAME, ()) >= 0}"
            case _:
                with store.open(NAME, TENSORS) as source:
                    target = bytearray(min(source.nbytes, 16))
                    source.read_into(0, memoryview(target))
                    return "read"
    finally:
        peer.close()


def answers_by(listening: socket.socket, said: dict[str, Any], wanted: str, edits: Changes) -> None:
    connection, _ = listening.accept()
    with connection, suppress(OSError, CheckpointError, KeyError, UnicodeEncodeError):
        wire = Wire(connection, every=60)

        def send(word: str, more: bytes = b"") -> None:
            raw = framed(said[word]) + more
            if word != wanted or not edits:
                connection.sendall(raw)
                return
            connection.sendall(altered(raw, edits))
            connection.shutdown(socket.SHUT_WR)  # nobody waits for what was cut off

        send("greeting")
        theirs = wire.receive()["nonce"]
        if not said["proof"]:
            said["proof"] = {"mac": proof(KEY, "server", str(said["greeting"]["nonce"]), theirs)}
        send("proof")
        while True:
            match wire.receive()["op"]:
                case "read":
                    send("begun", bytes(16))
                    send("read")
                case other:
                    send(other)


# Files of other formats

WEIGHTS_OF = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@cache
def sources() -> dict[str, dict[str, bytes]]:
    """A small one of each format: its files."""
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
    """Another part of this name in a file of torch.save, with its true checksum."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(target, "w", kind) as new:
        for part in old.namelist():
            new.writestr(part, change(old.read(part)) if part.endswith(name) else old.read(part))
    return target.getvalue()


def converted(folder: Path, files: dict[str, bytes], name: str = "") -> str:
    """What `holdfast checkpoints convert` makes of them: a whole commit, or nothing."""
    source, target = folder / "in", folder / "out"
    for file, data in files.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes(data)

    def act() -> str:
        found = read_source(source / name if name else source)
        made = import_weights.commit(
            FolderStore(target), import_weights.objects(found, name="all", split=False), step=1, made=NOW
        )
        assert verify(FolderStore(target), made).whole
        return "converted"

    with untouched(source), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = outcome(act)
    assert target.exists() == (said == "converted")
    return said


NOW = datetime(2026, 1, 31, tzinfo=UTC)


def pt(folder: Path, changes: Changes) -> str:
    """The whole file, or the pickle in it under a true checksum."""
    raw, edits = sources()["pt"]["w.pt"], told_apart(changes)[1]
    inside = changes[0][0] % 4
    raw = zipped(raw, "data.pkl", lambda data: altered(data, edits)) if inside else altered(raw, edits)
    return converted(folder, {"w.pt": raw}, "w.pt")


def bin_file(folder: Path, changes: Changes) -> str:
    return converted(folder, {"w.bin": altered(sources()["bin"]["w.bin"], told_apart(changes)[1])}, "w.bin")


def safetensors(folder: Path, changes: Changes) -> str:
    values, edits = told_apart(changes)
    raw = sources()["safetensors"]["w.safetensors"]
    length = int.from_bytes(raw[:8], "little")
    header = of_json(json.loads(raw[8 : 8 + length]), values)
    raw = altered(len(header).to_bytes(8, "little") + header + raw[8 + length :], edits)
    return converted(folder, {"w.safetensors": raw}, "w.safetensors")


def index(folder: Path, changes: Changes) -> str:
    files = sources()["index"]
    (name,) = (name for name in files if name.endswith(".json"))
    return converted(folder, {**files, name: of_json(json.loads(files[name]), changes)})


def dcp_folder(folder: Path, changes: Changes) -> str:
    """The records, or now and then the tensors."""
    files, edits = sources()["dcp"], told_apart(changes)[1]
    other = next(name for name in files if name != ".metadata")
    name = ".metadata" if changes[0][0] % 4 else other
    return converted(folder, {**files, name: altered(files[name], edits)})


ANY = (CHANGES | EDITS).filter(bool)
TARGETS: dict[str, tuple[Target, Any]] = {
    "claim": (claim, ANY),
    "table": (table, ANY),
    "page": (page, EDITS),
    "slices": (slices, ANY),
    "greetings": (greetings, ANY),
    "requests": (requests, ANY),
    "answers": (answers, ANY),
    "pt": (pt, EDITS),
    "bin": (bin_file, EDITS),
    "safetensors": (safetensors, ANY),
    "index": (index, ANY),
    "dcp": (dcp_folder, EDITS),
}
KEPT = [(name, said, changes) for name in TARGETS for said, changes in CORPUS[name].items()]


@pytest.mark.parametrize(("name", "said", "changes"), KEPT, ids=[f"{name}-{said}" for name, said, _ in KEPT])
def test_each_way_that_was_found_to_an_error_or_through_is_taken_again(
    tmp_path: Path, name: str, said: str, changes: Changes
) -> None:
    """Functions may change, and with them the corpus; not the kind of error, by which others decide. Where a change
    of what torch writes leads is torch's."""
    found = TARGETS[name][0](tmp_path, changes)
    assert name in ("pt", "bin", "dcp") or found.partition(":")[0] == said.partition(":")[0]


@pytest.mark.parametrize("name", TARGETS)
@FUZZ
@given(data=st.data())
def test_any_change_of_it_is_taken_right_or_refused(name: str, data: st.DataObject) -> None:
    target, changes = TARGETS[name]
    with TemporaryDirectory() as folder:
        target(Path(folder), data.draw(changes))


# What asks for much in few bytes, or for something else than to be read


def bytearrays(count: int) -> bytes:
    """`torch.load` may make these with weights alone."""
    return b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + count.to_bytes(5, "little") + b"\x85R."


def doubled(times: int) -> bytes:
    """Bytes in hexadecimal digits, those in hexadecimal digits, and so on."""
    once = b"c_codecs\nencode\n"
    return (
        b"\x80\x02"
        + once * times
        + b"X\x08\x00\x00\x0012345678X\x06\x00\x00\x00latin1\x86R"
        + (b"X\x03\x00\x00\x00hex\x86R" * (times - 1))
        + b"."
    )


@pytest.mark.parametrize("raw", [bytearrays(10 * 2**30), doubled(33)], ids=["bytearray", "codec"])
@pytest.mark.parametrize("kind", ["pt", "bin"])
def test_a_pickle_of_little_that_asks_for_10_gb_is_refused_before_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, kind: str
) -> None:
    monkeypatch.setattr(memory_limit, "SPARE_BYTES", 256 << 20)
    data = zipped(sources()["pt"]["w.pt"], "data.pkl", lambda _: raw) if kind == "pt" else legacy(raw)
    assert len(data) < 8192
    assert (
        converted(tmp_path, {f"w.{kind}": data}, f"w.{kind}") == "DamagedError: torch_save.read_pickled, MemoryError"
    )


def legacy(raw: bytes) -> bytes:
    """As torch wrote it before 1.6: four pickles, of which the last is what was saved."""
    before = b"".join(pickle.dumps(one, 2) for one in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    return before + raw


def test_lists_of_which_each_holds_the_next_one_twice_are_not_written_out(tmp_path: Path) -> None:
    tree: Any = []
    for _ in range(60):
        tree = [tree, tree]
    (tmp_path / "in").mkdir()
    torch.save({"model": tree}, tmp_path / "in" / "w.pt")
    said = converted(tmp_path, {}, "w.pt")
    assert said == "DamagedError: torch_save._tensors"


def test_a_file_that_is_larger_unpacked_is_refused(tmp_path: Path) -> None:
    raw = zipped(sources()["pt"]["w.pt"], "data/0", lambda _: bytes(64 << 20), zipfile.ZIP_DEFLATED)
    assert len(raw) < 1 << 20
    assert converted(tmp_path, {"w.pt": raw}, "w.pt") == "DamagedError: torch_save._check"


METADATA = "ctorch.distributed.checkpoint.metadata\nMetadata\n"
FUNCTION = "ctorch.serialization\n_get_layout\n"
PATHS = "cpathlib\nPosixPath\n"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (f"{METADATA}N}}Vx\nI1\ns\x86b.".encode("latin-1"), "UnknownFormatError: dcp.load_build"),
        (f"{PATHS}N}}Vname\nV../x\ns\x86b.".encode("latin-1"), "UnknownFormatError: dcp.load_build"),
        (
            b"ctorch.serialization\n_get_layout\nN}V__defaults__\nNs\x86b.",
            "UnknownFormatError: dcp.load_build",
        ),
        (b"cposix\nmkdir\nVran\n\x85R.", "UnknownFormatError: dcp.find_class"),
        (b"Nr\xff\xff\xff\xff.", "UnknownFormatError: dcp._checked"),
        (b"\x80\x05\x96" + (10 * 2**30).to_bytes(8, "little"), "DamagedError: dcp._metadata, MemoryError"),
    ],
    ids=["a record's class", "the class of paths", "a function", "code", "the last place of the memo", "10 GB"],
)
def test_records_of_dcp_that_do_something_else_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, said: str
) -> None:
    monkeypatch.setattr(memory_limit, "SPARE_BYTES", 256 << 20)
    files = {**sources()["dcp"], ".metadata": raw}
    before = {kind: set(vars(kind)) for kind in (Metadata, PurePath)}
    with little_memory():
        assert converted(tmp_path, files) == said
    assert {kind: set(vars(kind)) for kind in before} == before
    assert PurePath("../x").name == "x"


def test_a_slot_of_little_that_claims_a_manifest_of_10_gb_takes_no_memory(tmp_path: Path) -> None:
    raw = resealed(slot(), lambda raw: encode_json({**json.loads(raw), "manifest": [4096, 10 * 2**30]}))
    assert slot_of(tmp_path, raw) == "not restored: of 0"


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_file_in_the_place_of_a_slot_is_passed_over(tmp_path: Path, put: Callable[[Path], None]) -> None:
    put(tmp_path / "own-0.slot-0")
    assert MemoryStore(tmp_path).commits() == ()
    with pytest.raises(DamagedError, match="missing"):
        MemoryStore(tmp_path).open(NAME, TENSORS)


def test_a_claim_under_a_name_that_no_attempt_gives_is_none(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "01.2.json").write_bytes(encode_json(CLAIM.to_json()))
    assert claims.list_claims(tmp_path) == ()


@pytest.mark.parametrize("said", [(256 << 20).to_bytes(4, "big"), framed({"nonce": "n" * 2000})])
def test_a_server_that_has_proved_nothing_gets_no_memory(tmp_path: Path, said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, little_memory(1 << 20):
        thread = threading.Thread(target=lambda: listening.accept()[0].sendall(said))
        thread.start()
        with pytest.raises(CheckpointError, match="a message of"):
            Peer(neighbour(listening.getsockname()[1]), KEY).ask({"op": "list"})
        thread.join()


@pytest.mark.parametrize("length", [128 << 20, (256 << 20) + 1])
def test_a_message_that_claims_much_takes_as_much_memory_as_came_of_it(length: int) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    ours, _ = server.accept()
    with server, client, ours, little_memory(4 << 20):
        client.sendall(length.to_bytes(4, "big") + b"x" * 1000)
        client.shutdown(socket.SHUT_WR)
        with pytest.raises((CheckpointError, ConnectionError)):
            Wire(ours).receive()
