"""`holdfast checkpoints` on the memory and disk of one node: what it has, whether that is intact, and what is
unknown."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Commands
from tier_ranks import TierRank

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.tiers.local_disk_tier import LocalTier
from holdfast.checkpoint.tiers.memory_tier import MemoryTier
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.cli.checkpoints.access.node_store import open_node_store
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.attempt import AttemptId

World = Callable[..., list[Any]]
TERMS = FencingContext(claims=(), job_uid="job", resume=Resume.ALWAYS)
KEY = b"k" * 32
DATA = {"model/a": b"a" * 700_000, "model/b": b"b" * 700_000}
COMMIT = "step-3.g1.a1"


def snapshot_of(step: int, rank: int) -> Snapshot:
    return Snapshot(
        name=CheckpointName(step=step, attempt_id=AttemptId(1, 1)),
        specs=[TensorSpec(name=name, dtype="U8", shape=(len(one),)) for name, one in DATA.items()],
        read=lambda piece: DATA[piece.spec.name][piece.start[0] : piece.start[0] + piece.shape[0]],
        state={"objects": {"model": {"a": {"$tensor": "model/a"}, "b": {"$tensor": "model/b"}}}, "counters": {}},
        data=None,
        per_rank={"rank": rank},
        numerics={},
        job_uid="job",
        publication="p",
    )


def at(node: str, port: int = 0) -> Neighbour:
    return Neighbour(node=node, pod=node, host="127.0.0.1", port=port)


@pytest.fixture
def memory(tmp_path: Path, world: World) -> Iterator[Callable[..., Path]]:
    """The memory of a node under `launcher-0`, after ranks of two nodes saved steps."""
    servers: list[PeerServer] = []

    def make(*steps: int, copies: bool) -> Path:
        folders = {node: tmp_path / node / "launcher-0" for node in "ab"}
        for folder in folders.values():
            folder.mkdir(parents=True)
            servers.append(PeerServer(folder, host="127.0.0.1"))
            servers[-1].key = KEY
        members = {node: at(node, server.port) for node, server in zip("ab", servers, strict=True)}

        def act(exchange: Any) -> None:
            node = "ab"[exchange.rank]
            settings = TierSettings(
                folder=folders[node],
                limit=None,
                interval=1,
                peer_interval=1 if copies else None,
                per_second=None,
                me=members[node],
                key=KEY,
            )
            tier = TierRank(MemoryTier(), settings, exchange, neighbours=frozenset(members.values()))
            for step in steps:
                assert tier.save(snapshot_of(step, exchange.rank), TERMS).committed
            tier.close()

        world(2, act)
        return tmp_path / "a"

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def disk(tmp_path: Path, world: World) -> Path:
    """The disk of node a under its launcher, after ranks of two nodes saved step 3."""

    def act(exchange: Any) -> None:
        node = "ab"[exchange.rank]
        folder = tmp_path / node / "launcher-0"
        settings = TierSettings(folder=folder, limit=None, interval=1, per_second=None, me=at(node), key=KEY)
        assert TierRank(LocalTier(), settings, exchange).save(snapshot_of(3, exchange.rank), TERMS).committed

    world(2, act)
    return tmp_path / "a"


def own_of(disk: Path) -> Path:
    (found,) = disk.glob("launcher-0/*-own-0")
    return found


def bytes_in(root: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["memory:{}", "memory://{}", "{}", "memory:{}/launcher-0"])
def test_memory_with_copies_of_a_peer_is_handled_as_complete(
    holdfast: Commands, memory: Callable[..., Path], tmp_path: Path, form: str
) -> None:
    """The commands list, show, verify and export it."""
    folder = memory(2, 3, copies=True)
    where, before = form.format(folder), bytes_in(folder)
    listed = holdfast.json("ls", where)
    assert [(line["step"], line["state"], line["note"]) for line in listed["commits"]] == [
        (3, "readable", ""),
        (2, "readable", ""),
    ]
    assert holdfast.json("show", where, "--step", 3)["tensors"][0]["name"] == "model/a"
    assert holdfast("verify", where) == 0
    assert f"{COMMIT}: complete, 1.3 MiB verified" in holdfast.out
    assert holdfast("export", f"{where}/{COMMIT}", tmp_path / "weights.safetensors") == 0
    assert DATA["model/b"] in (tmp_path / "weights.safetensors").read_bytes()
    assert holdfast("copy", where, tmp_path / "copies", "--step", 3) == 0
    assert holdfast("verify", tmp_path / "copies") == 0
    assert bytes_in(folder) == before, "is read-only here"


def test_without_copies_own_part_is_verified_and_others_named(
    holdfast: Commands, memory: Callable[..., Path], tmp_path: Path
) -> None:
    where = f"memory:{memory(3, copies=False)}"
    (line,) = holdfast.json("ls", where)["commits"]
    assert line["note"] == "2 of 4 files are here"
    assert holdfast("show", where) == 0
    assert "2 of 4 files are here" in holdfast.out
    assert holdfast("verify", where) == 0
    assert f"{COMMIT}: the files on this node are good, " in holdfast.out
    assert "not verified, because they are on other nodes: rank-1.json, rank-1.safetensors" in holdfast.out
    assert holdfast("export", where, tmp_path / "weights.safetensors") == 3
    assert "is on the node of the rank that wrote it" in holdfast.err
    assert not (tmp_path / "weights.safetensors").exists()


def test_a_flipped_byte_in_memory_is_damage(holdfast: Commands, memory: Callable[..., Path]) -> None:
    folder = memory(3, copies=False)
    (slot,) = [path for path in folder.glob("launcher-0/own-0.slot-*") if DATA["model/a"][:99] in path.read_bytes()]
    data = bytearray(slot.read_bytes())
    data[data.index(DATA["model/a"][:99])] ^= 1
    slot.write_bytes(data)
    assert holdfast("verify", f"memory:{folder}") == 1
    assert f"{COMMIT}: CORRUPT; not verified" in holdfast.out
    assert "tensor model/a" in holdfast.out


def test_checkpoint_overwritten_meanwhile_is_gone_not_corrupt(
    memory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = memory(3, copies=True)
    store = open_node_store(folder)
    assert store is not None
    here = store.here

    def then_lost(name: CheckpointName, files: Any) -> tuple[str, ...]:
        found = here(name, files)
        for path in folder.glob("launcher-0/own-*.slot-*"):
            path.unlink()
        return found

    monkeypatch.setattr(store, "here", then_lost)
    assert verify(store, CheckpointName(step=3, attempt_id=AttemptId(1, 1))).gone


def test_checkpoint_overwritten_during_the_search_is_not_corrupt(
    memory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = memory(3, copies=True)
    store = open_node_store(folder)
    assert store is not None
    (own,) = store._folders
    asked: list[str] = []

    def has(name: CheckpointName, file: str) -> bool:
        found = own.has(name, file)
        if not asked:  # between the two files of a rank
            for path in folder.glob("launcher-0/own-*.slot-*"):
                path.unlink()
        asked.append(file)
        return found

    monkeypatch.setattr(store, "_folders", [replace(own, has=has)])
    assert verify(store, CheckpointName(step=3, attempt_id=AttemptId(1, 1))).gone
    assert asked[0].startswith("rank-0."), "the rank whose slot is overwritten"


def test_memory_is_never_corrupt_while_a_job_saves_every_step(memory: Callable[..., Path], tmp_path: Path) -> None:
    trains = threading.Thread(target=memory, args=range(1, 200), kwargs={"copies": True})
    trains.start()
    verdicts = []
    while trains.is_alive():
        store = open_node_store(tmp_path / "a")
        verdicts += [verify(store, name) for name in (store.commits() if store else ())]
    trains.join()
    assert verdicts
    assert [verdict.damages for verdict in verdicts if verdict.damaged] == []
    store = open_node_store(tmp_path / "a")  # most of them were overwritten during the read
    assert store is not None
    assert verify(store, store.commits()[-1]).verified


@pytest.mark.parametrize("form", ["local:{}", "{}", "rank"])
def test_of_a_disk_the_own_part_is_verified_and_the_rest_named(holdfast: Commands, disk: Path, form: str) -> None:
    where, before = own_of(disk) if form == "rank" else form.format(disk), bytes_in(disk)
    (verdict,) = holdfast.json("verify", where)["commits"]
    assert (verdict["verified"], verdict["damage"]) == (False, [])
    assert verdict["elsewhere"] == ["rank-1.json", "rank-1.safetensors"]
    assert 700_000 < verdict["bytes"] < 710_000
    assert bytes_in(disk) == before


def test_a_flipped_byte_on_a_disk_is_damage_with_its_tensor(holdfast: Commands, disk: Path) -> None:
    file = own_of(disk) / COMMIT / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert holdfast("verify", own_of(disk)) == 1
    assert "digest of chunk 0 differs" in holdfast.out


@pytest.mark.parametrize("file", ["rank-0.safetensors", "rank-0.json"])
def test_missing_file_that_must_accompany_another_one_is_lost(holdfast: Commands, disk: Path, file: str) -> None:
    (own_of(disk) / COMMIT / file).unlink()
    (verdict,) = holdfast.json("verify", disk, code=1)["commits"]
    assert [one["file"] for one in verdict["damage"]] == [file]
    assert "which was written with it, is here" in verdict["damage"][0]["reason"]


def test_manifest_without_files_of_any_rank_has_lost_them(holdfast: Commands, disk: Path) -> None:
    for file in (own_of(disk) / COMMIT).glob("rank-*"):
        file.unlink()
    assert holdfast("verify", own_of(disk)) == 1
    assert "no rank's files are next to it" in holdfast.out


@pytest.mark.parametrize(
    "words",
    [
        ["prune", "WHERE", "--keep-last", "1"],
        ["verify", "WHERE", "--quarantine"],
        ["copy", "WHERE", "WHERE"],
        ["convert", "w.pt", "WHERE"],
    ],
)
def test_nothing_is_changed_where_ranks_keep_order(holdfast: Commands, disk: Path, words: list[str]) -> None:
    before = bytes_in(disk)
    assert holdfast(*(f"local:{disk}" if word == "WHERE" else word for word in words)) == 2
    assert "is read-only here" in holdfast.err
    assert bytes_in(disk) == before


@pytest.mark.parametrize(
    ("where", "code", "says"),
    [
        ("memory:relative", 2, "expected memory:/PATH"),
        ("memory:/not-there", 3, "no such folder"),
        ("memory:DISK", 2, "belongs to another tier: pass local:"),
        ("memory:EMPTY", 0, "has no checkpoint"),
    ],
)
def test_a_place_that_does_not_do_is_said_with_what_would(
    holdfast: Commands, disk: Path, where: str, code: int, says: str
) -> None:
    (disk.parent / "empty").mkdir()
    assert holdfast("ls", where.replace("DISK", str(disk)).replace("EMPTY", str(disk.parent / "empty"))) == code
    assert says in holdfast.out + holdfast.err


def test_a_folder_that_is_called_memory_is_a_folder(
    holdfast: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: Callable[..., Any]
) -> None:
    commit(tmp_path / "memory", 7, DATA)
    monkeypatch.chdir(tmp_path)
    assert holdfast("verify", "memory") == 0
