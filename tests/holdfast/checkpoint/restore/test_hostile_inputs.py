"""Mutated inputs are read correctly or refused: claims, slots, slice digests, peer messages, foreign files."""

from __future__ import annotations

import copy
import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import xxhash
from hostile_inputs import (
    CLAIM,
    KEY,
    NAME,
    TENSORS,
    Changes,
    converted,
    framed,
    index,
    neighbour,
    of_json,
    outcome,
    server,
    slot,
    slot_of,
    sources,
    table,
    tree,
    untouched,
    zipped,
)
from hypothesis import given
from hypothesis import strategies as st
from mutations import CHANGES, CORPUS, EDITS, FUZZ, altered, little_memory, mutated, told_apart

from holdfast.checkpoint.folder import claims
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.writer import save
from holdfast.checkpoint.stores.memory.peer_client import Neighbour, Peer, PeerStore, free_space
from holdfast.checkpoint.stores.memory.peer_protocol import Wire
from holdfast.core.attempt import Claim
from holdfast.core.connections import proof
from holdfast.core.errors import CheckpointError

Target = Callable[[Path, Changes], str]


def claim(folder: Path, changes: Changes) -> str:
    (folder / "claims").mkdir()
    (folder / "claims" / "1.2.json").write_bytes(of_json(CLAIM.to_json(), changes))

    def act() -> str:
        (found,) = claims.list_claims(folder)
        assert found.attempt_id == CLAIM.attempt_id
        assert Claim.from_json(found.to_json()) == found
        return "taken"

    with little_memory(), untouched(folder):
        return outcome(act)


def page(folder: Path, changes: Changes) -> str:
    """Mutate the bytes of a slot. The seal may become invalid."""
    return slot_of(folder, altered(slot(), [(place % 3000, *rest) for place, *rest in told_apart(changes)[1]]))


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
            per_rank={},
            numerics={},
        )
        assert save(Path(folder), snapshot, SingleRank()).committed
        return tree(Path(folder) / str(NAME))


def slices(folder: Path, changes: Changes) -> str:
    """Mutate slice digests: they are ignored, or the checkpoint is refused. No byte is read as another one."""
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
        found = restore(folder, SingleRank(), select=lambda _: {"w": (100, 70_000)})
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


def requests(folder: Path, changes: Changes) -> str:
    """Mutate requests to a server from a client with the key, and the bytes that follow them."""
    values, edits = told_apart(changes)
    first = changes[0][0]
    request = mutated(copy.deepcopy(REQUESTS[first % len(REQUESTS)]), values)
    follows = COPY if isinstance(request, dict) and request.get("op") == "put" else b""
    said = said_to_server(folder, altered(framed(request) + follows, edits), known=True)
    return f"{said}, {REQUESTS[first % len(REQUESTS)]['op']}"


def greetings(folder: Path, changes: Changes) -> str:
    """Mutate greetings to a server from a client without the key."""
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
        with suppress(OSError):  # the server may have closed the connection
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionError):  # reset: the server had not read everything that was sent
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
    """Mutate answers to a client, from a server with or without the key."""
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
                return outcome(lambda: answer_of(neighbour(listening.getsockname()[1]), wanted))
        finally:
            thread.join()


def answer_of(where: Neighbour, wanted: str) -> str:
    peer = Peer(where, KEY)
    store = PeerStore(peer, {"job"})
    try:
        match wanted:
            case "list":
                return f"commits: {len(store.commits())}"
            case "manifest":
                return f"manifest: {store.manifest(NAME).step}"
            case "room":
                return f"room: {free_space(peer, NAME, ()) >= 0}"
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
            connection.shutdown(socket.SHUT_WR)  # the server does not wait for the part that was cut off

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


def pt(folder: Path, changes: Changes) -> str:
    """Mutate the complete file, or the pickle in it under a valid checksum."""
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


def dcp_folder(folder: Path, changes: Changes) -> str:
    """Mutate the records, and sometimes the tensors."""
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
def test_each_known_fuzzing_finding_is_replayed(tmp_path: Path, name: str, said: str, changes: Changes) -> None:
    """Code changes may move an error, but not change its type, which callers use.

    Errors that torch raises for its own files may change.
    """
    found = TARGETS[name][0](tmp_path, changes)
    assert name in ("pt", "bin", "dcp") or found.partition(":")[0] == said.partition(":")[0]


@pytest.mark.parametrize("name", TARGETS)
@FUZZ
@given(data=st.data())
def test_any_change_of_it_is_taken_right_or_refused(name: str, data: st.DataObject) -> None:
    target, changes = TARGETS[name]
    with TemporaryDirectory() as folder:
        target(Path(folder), data.draw(changes))


FUNCTION = "ctorch.serialization\n_get_layout\n"
