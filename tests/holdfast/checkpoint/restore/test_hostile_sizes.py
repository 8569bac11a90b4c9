"""Inputs that claim more than they contain take no memory."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from hostile_inputs import (
    CLAIM,
    KEY,
    NAME,
    TENSORS,
    converted,
    framed,
    neighbour,
    resealed,
    slot,
    slot_of,
    sources,
    zipped,
)
from mutations import little_memory
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.checkpoint.folder import claims
from holdfast.checkpoint.io.durable_files import encode_json
from holdfast.checkpoint.stores.memory.peer_client import Peer
from holdfast.checkpoint.stores.memory.peer_protocol import Wire
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.cli.checkpoints.formats import memory_limit
from holdfast.core.errors import CheckpointError, CorruptCheckpointError

# Small inputs that request much memory or another action than a read


def bytearrays(count: int) -> bytes:
    """`torch.load` may create these with `weights_only=True`."""
    return b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + count.to_bytes(5, "little") + b"\x85R."


def doubled(times: int) -> bytes:
    """Nest bytes in hexadecimal digits repeatedly, which doubles their size each time."""
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
def test_small_pickle_claiming_10_gb_is_refused_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, kind: str
) -> None:
    monkeypatch.setattr(memory_limit, "SPARE_BYTES", 256 << 20)
    data = zipped(sources()["pt"]["w.pt"], "data.pkl", lambda _: raw) if kind == "pt" else legacy(raw)
    assert len(data) < 8192
    assert (
        converted(tmp_path, {f"w.{kind}": data}, f"w.{kind}")
        == "CorruptCheckpointError: torch_save.read_pickled, MemoryError"
    )


def legacy(raw: bytes) -> bytes:
    """The format of torch before 1.6: four pickles, the last of which is the saved object."""
    before = b"".join(pickle.dumps(one, 2) for one in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    return before + raw


def test_lists_that_double_at_each_level_are_not_expanded(tmp_path: Path) -> None:
    tree: Any = []
    for _ in range(60):
        tree = [tree, tree]
    (tmp_path / "in").mkdir()
    torch.save({"model": tree}, tmp_path / "in" / "w.pt")
    said = converted(tmp_path, {}, "w.pt")
    assert said == "CorruptCheckpointError: torch_save._tensors"


def test_a_file_that_is_larger_unpacked_is_refused(tmp_path: Path) -> None:
    raw = zipped(sources()["pt"]["w.pt"], "data/0", lambda _: bytes(64 << 20), zipfile.ZIP_DEFLATED)
    assert len(raw) < 1 << 20
    assert converted(tmp_path, {"w.pt": raw}, "w.pt") == "CorruptCheckpointError: torch_save._check"


METADATA = "ctorch.distributed.checkpoint.metadata\nMetadata\n"


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
        (b"\x80\x05\x96" + (10 * 2**30).to_bytes(8, "little"), "CorruptCheckpointError: dcp._metadata, MemoryError"),
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


def test_small_slot_claiming_a_10_gb_manifest_takes_no_memory(tmp_path: Path) -> None:
    raw = resealed(slot(), lambda raw: encode_json({**json.loads(raw), "manifest": [4096, 10 * 2**30]}))
    assert slot_of(tmp_path, raw) == "not restored: of 0"


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_file_in_the_place_of_a_slot_is_passed_over(tmp_path: Path, put: Callable[[Path], None]) -> None:
    put(tmp_path / "own-0.slot-0")
    assert MemoryStore(tmp_path).commits() == ()
    with pytest.raises(CorruptCheckpointError, match="missing"):
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
            Peer(neighbour(listening.getsockname()[1]), KEY).call({"op": "list"})
        thread.join()


@pytest.mark.parametrize("length", [128 << 20, (256 << 20) + 1])
def test_message_takes_only_the_memory_of_its_received_bytes(length: int) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    ours, _ = server.accept()
    with server, client, ours, little_memory(4 << 20):
        client.sendall(length.to_bytes(4, "big") + b"x" * 1000)
        client.shutdown(socket.SHUT_WR)
        with pytest.raises((CheckpointError, ConnectionError)):
            Wire(ours).receive()
