"""Commits in the memory of several nodes: whichever one is lost, the last step is read back from the others."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tier_ranks import TierRank

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.memory import peer_client as peers
from holdfast.checkpoint.stores.memory import peer_server
from holdfast.checkpoint.stores.memory.peer_client import Neighbour, Peer, PeerStore, successor
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.stores.memory.slot import FileRange
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.checkpoint.tiers.memory_tier import MemoryTier
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, DamagedError, PeerLostError

KEY = b"k" * 32
FIRST = AttemptId(1, 1)
TERMS = FencingContext(claims=(), job_uid="job", resume=Resume.ALWAYS)


def tensors(step: int) -> dict[str, bytes]:
    return {"large": bytes([step]) * (3 << 20), "small": b"s" * (step + 1)}


def snapshot_of(step: int, rank: int, pair: AttemptId = FIRST) -> Snapshot:
    data = tensors(step)
    return Snapshot(
        name=CheckpointName(step=step, pair=pair),
        specs=[TensorSpec(name=name, dtype="U8", shape=(len(one),)) for name, one in data.items()],
        read=lambda piece: data[piece.spec.name][piece.start[0] : piece.start[0] + piece.shape[0]],
        state={"objects": {}, "counters": {}},
        data=None,
        alone={"rank": rank},
        numerics={},
        job_uid="job",
        publication="p",
    )


class Nodes:
    """One launcher a node, and one rank each."""

    def __init__(self, root: Path, names: str, **settings: Any) -> None:
        self.names = names
        self.tiers: dict[str, TierRank] = {}
        self.folders = {name: root / name for name in names}
        for folder in self.folders.values():
            folder.mkdir()
        self.servers = {
            name: PeerServer(self.folders[name], host="127.0.0.1", limit=settings.get("limit")) for name in names
        }
        for server in self.servers.values():
            server.key = KEY
        self.at = {
            name: Neighbour(node=name, pod=name, host="127.0.0.1", port=self.servers[name].port) for name in names
        }
        given = {"limit": None, "interval": 1, "peer_interval": 1, "per_second": None, **settings}
        self.settings = {
            name: TierSettings(folder=self.folders[name], me=self.at[name], key=KEY, **given) for name in names
        }

    def tier(self, exchange: Any, check: Callable[[], None] = lambda: None) -> TierRank:
        """A rank that was started anew; the process before it is gone."""
        name = self.names[exchange.rank]
        if name in self.tiers:
            self.tiers[name].close()
        neighbours = frozenset(self.at.values())
        tier = TierRank(MemoryTier(), self.settings[name], exchange, neighbours=neighbours, check=check)
        self.tiers[name] = tier
        return tier

    def move(self, name: str, port: int) -> None:
        """Its memory is served elsewhere."""
        self.at[name] = replace(self.at[name], port=port)
        self.settings[name] = replace(self.settings[name], me=self.at[name])

    def lose(self, name: str) -> None:
        self.servers.pop(name).close()
        shutil.rmtree(self.folders.pop(name))

    def stores(self, at: str) -> list[CheckpointStore]:
        """As a rank there has them."""
        others = [PeerStore(Peer(self.at[name], KEY)) for name in self.servers if name != at]
        return [MemoryStore(self.folders[at]), *others]

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nodes]]:
    """Whose greetings may take as long as they do on a busy machine."""
    made: list[Nodes] = []
    for module in (peers, peer_server):
        monkeypatch.setattr(module, "GREETING_SECONDS", 240.0)

    def make(names: str, **settings: Any) -> Nodes:
        made.append(Nodes(tmp_path, names, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def read(stores: list[CheckpointStore], name: CheckpointName) -> dict[str, bytes]:
    """Everything, from whichever store has it, each chunk compared with the manifest."""
    manifest = next(store.manifest(name) for store in stores if name in store.commits())
    files = {file: fetch(stores, manifest, name, file) for file in manifest.files}
    return {
        tensor: b"".join(files[c.file][c.offset : c.offset + c.nbytes] for c in sorted(record.chunks, key=str))
        for tensor, record in manifest.tensors.items()
    }


def fetch(stores: list[CheckpointStore], manifest: Manifest, name: CheckpointName, file: str) -> bytes:
    for store in stores:
        try:
            with store.open(name, file) as source:
                data = bytearray(source.nbytes)
                source.read_into(0, memoryview(data))
        except DamagedError:
            continue
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        assert tuple(map(xxhash.xxh3_128_hexdigest, chunks)) == manifest.files[file].chunks
        return bytes(data)
    raise AssertionError(f"{file} is nowhere")


def saves(tier: TierRank, rank: int, *steps: int) -> list[SaveResult]:
    return [tier.save(snapshot_of(step, rank), TERMS) for step in steps]


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_with_copies_the_last_step_survives_the_loss_of_any_one_node(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], lost: str
) -> None:
    made = nodes("abc")
    results = world(3, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2, 3))
    assert all(result.committed for mine in results for result in mine), results
    made.lose(lost)
    for at in made.folders:
        assert read(made.stores(at), CheckpointName(step=3, pair=FIRST)) == tensors(3)
        assert read(made.stores(at), CheckpointName(step=2, pair=FIRST)) == tensors(2)


@pytest.mark.parametrize("mebibytes", [4, 24], ids=["at once", "in batches"])
def test_weights_that_are_not_finite_on_one_rank_are_committed_on_none_and_the_commit_before_stays(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], mebibytes: int
) -> None:
    made = nodes("ab")
    spec = TensorSpec(name="w", dtype="F8_E5M2", shape=(mebibytes << 20,))

    def inspected(exchange: Any) -> list[SaveResult]:
        tier, results = made.tier(exchange), []
        for step, byte in ((1, b"\x01"), (2, b"\xff" if exchange.rank else b"\x01")):
            snapshot = replace(snapshot_of(step, exchange.rank), specs=[spec], weights=frozenset({"w"}))
            results.append(tier.save(replace(snapshot, read=lambda piece, byte=byte: byte * piece.nbytes), TERMS))
        return results

    for first, second in world(2, inspected):
        assert first.committed
        assert (second.committed, second.cause) == (False, "NonFinite")
        assert second.message.startswith("rank 1: w holds values that are not finite")
    for at in "ab":
        assert MemoryStore(made.folders[at]).commits() == (CheckpointName(step=1, pair=FIRST),)


def test_every_rank_seals_the_same_manifest_though_each_counts_failures_by_its_own_clock(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab")

    def counted(exchange: Any) -> SaveResult:
        snapshot = snapshot_of(1, exchange.rank)
        snapshot = replace(snapshot, state={**snapshot.state, "failures": {"seconds": float(exchange.rank)}})
        return made.tier(exchange).save(snapshot, TERMS)

    assert all(result.committed for result in world(2, counted))
    name = CheckpointName(step=1, pair=FIRST)
    manifests = [MemoryStore(made.folders[at]).manifest(name) for at in "ab"]
    assert manifests[0] == manifests[1]
    assert manifests[0].state["failures"] == {"seconds": 0.0}


def test_every_rank_seals_the_same_manifest_though_they_filled_a_mapping_in_other_orders(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab")

    def ordered(exchange: Any) -> list[SaveResult]:
        tier, results = made.tier(exchange), []
        for step, pairs in ((1, [["b", 1], ["a", 2]]), (2, [["b", 1], ["a", 2]][:: 1 - 2 * exchange.rank])):
            snapshot = snapshot_of(step, exchange.rank)
            state = {"objects": {"box": {"$map": pairs}}, "failures": {"seconds": float(exchange.rank)}}
            results.append(tier.save(replace(snapshot, state=state), TERMS))
        return results

    assert all(result.committed for mine in world(2, ordered) for result in mine)
    for step, kept in ((1, {"$map": [["b", 1], ["a", 2]]}), (2, {"a": 2, "b": 1})):
        name = CheckpointName(step=step, pair=FIRST)
        manifests = [MemoryStore(made.folders[at]).manifest(name) for at in "ab"]
        assert manifests[0] == manifests[1]
        assert manifests[0].objects == {"box": kept}


def test_tensors_that_change_their_kind_but_not_their_places_are_told_as_they_are_now(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab", peer_interval=None)

    def both(exchange: Any) -> list[SaveResult]:
        tier, first = made.tier(exchange), snapshot_of(1, exchange.rank)
        specs = [replace(spec, dtype="I8") for spec in first.specs]
        second = replace(first, name=CheckpointName(step=2, pair=FIRST), specs=specs)
        return [tier.save(snapshot, TERMS) for snapshot in (first, second)]

    assert all(result.committed for mine in world(2, both) for result in mine)
    kinds = [
        {record.dtype for record in MemoryStore(made.folders["a"]).manifest(name).tensors.values()}
        for name in (CheckpointName(step=1, pair=FIRST), CheckpointName(step=2, pair=FIRST))
    ]
    assert kinds == [{"U8"}, {"I8"}]


def test_without_copies_it_survives_all_processes_and_no_node(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab", peer_interval=None)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2))
    assert read(made.stores("a"), CheckpointName(step=2, pair=FIRST)) == tensors(2)
    made.lose("b")
    with pytest.raises(AssertionError, match="nowhere"):
        read(made.stores("a"), CheckpointName(step=2, pair=AttemptId(1, 1)))


def test_copies_have_an_interval_of_their_own(nodes: Callable[..., Nodes], world: Callable[..., list[Any]]) -> None:
    made = nodes("ab", peer_interval=2)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2, 3))
    made.lose("a")
    assert read(made.stores("b"), CheckpointName(step=2, pair=FIRST)) == tensors(2)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("lost", "ab")
def test_a_commit_that_is_asked_for_is_copied_between_two_that_are_due_and_survives_any_one_node(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], lost: str, interval: int
) -> None:
    made = nodes("ab", interval=interval, peer_interval=3)

    def last(exchange: Any) -> SaveResult:
        tier = made.tier(exchange)
        due = [step for step in range(1, 5) if tier.due_at(step)]
        assert all(tier.save(snapshot_of(step, exchange.rank), TERMS).committed for step in due)
        return tier.save(snapshot_of(5, exchange.rank), TERMS, asked=True)

    results = world(2, last)
    assert all(result.committed and result.nbytes and result.copying for result in results)
    made.lose(lost)
    (stays,) = made.folders
    for step in (3, 5):
        assert read(made.stores(stays), CheckpointName(step=step, pair=FIRST)) == tensors(step)


@pytest.mark.parametrize("steps", [4, 5, 6, 7])
@pytest.mark.parametrize("lost", "ab")
def test_the_last_step_that_was_copied_survives_any_one_node_however_many_were_not(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], lost: str, steps: int
) -> None:
    made = nodes("ab", peer_interval=3)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, *range(1, steps + 1)))
    made.lose(lost)
    (stays,) = made.folders
    last = steps - steps % 3
    assert read(made.stores(stays), CheckpointName(step=last, pair=FIRST)) == tensors(last)


def test_also_after_another_attempt_went_on_from_one_that_was_not_copied(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab", peer_interval=3)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2, 3, 4))
    claim = Claim(pair=AttemptId(1, 2), job_uid="job", publication="p", from_step=4, from_pair=FIRST)

    def again(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        tier.restored(CheckpointName(step=4, pair=FIRST))
        return [tier.save(snapshot_of(5, exchange.rank, AttemptId(1, 2)), replace(TERMS, claims=(claim,)))]

    world(2, again)
    made.lose("a")
    assert read(made.stores("b"), CheckpointName(step=3, pair=FIRST)) == tensors(3)


def test_another_attempt_spares_what_was_copied_last_also_if_no_copy_was_due_then(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab", peer_interval=10)

    def first(exchange: Any) -> SaveResult:
        saves(tier := made.tier(exchange), exchange.rank, 10, 11)
        return tier.save(snapshot_of(12, exchange.rank), TERMS, asked=True)

    assert all(result.committed for result in world(2, first))
    claim = Claim(pair=AttemptId(1, 2), job_uid="job", publication="p", from_step=12, from_pair=FIRST)

    def again(exchange: Any) -> None:
        tier = made.tier(exchange)
        tier.restored(CheckpointName(step=12, pair=FIRST))
        for step in (13, 14, 15):
            snapshot = snapshot_of(step, exchange.rank, AttemptId(1, 2))
            assert tier.save(snapshot, replace(TERMS, claims=(claim,))).committed

    world(2, again)
    made.lose("a")
    assert read(made.stores("b"), CheckpointName(step=12, pair=FIRST)) == tensors(12)


def test_the_next_attempt_spares_what_it_goes_on_from(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab")
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 10, 11))
    claim = Claim(pair=AttemptId(1, 2), job_uid="job", publication="p", from_step=10, from_pair=AttemptId(1, 1))
    first = Claim(pair=AttemptId(1, 1), job_uid="job", publication="p", from_step=0)
    terms = replace(TERMS, claims=(first, claim))

    def again(exchange: Any) -> SaveResult:
        return made.tier(exchange).save(snapshot_of(11, exchange.rank, AttemptId(1, 2)), terms)

    assert all(result.committed for result in world(2, again))
    assert read(made.stores("a"), CheckpointName(step=10, pair=FIRST)) == tensors(10)
    assert read(made.stores("b"), CheckpointName(step=11, pair=AttemptId(1, 2))) == tensors(11)


def test_a_memory_that_is_too_small_is_refused_with_the_first_commit(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("a", limit=4 << 20)
    ((result,),) = world(1, lambda exchange: saves(made.tier(exchange), 0, 1))
    assert (result.committed, result.full, result.cause) == (False, True, "Full")
    assert result.message.startswith("rank 0: the memory tier is too small: own-0 needs two slots of")


def test_a_neighbour_whose_memory_is_too_small_refuses_the_first_commit_as_well(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab")
    made.servers["b"].close()
    server = made.servers["b"] = PeerServer(made.folders["b"], host="127.0.0.1", limit=5 << 20)
    server.key = KEY
    made.move("b", server.port)
    for (result,) in world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1)):
        assert (result.committed, result.full, result.cause) == (False, True, "Full")
        assert result.message.startswith("rank 0: b on b: the memory tier is too small: for-")


def test_a_neighbour_out_of_reach_fails_the_first_commit_and_not_the_training(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab")
    made.servers["b"].close()
    (first,), (second,) = world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1))
    assert not first.committed
    assert first == second
    assert "rank 0: b on b: " in first.message
    assert (first.copy_failed, first.cause) == (True, "Network"), "what is in this memory was not at fault"


def test_a_neighbour_that_has_no_room_for_a_later_commit_is_told_from_a_full_memory_here(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab")

    def act(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        before = saves(tier, exchange.rank, 1)
        if exchange.rank == 0:
            for path in made.folders["b"].glob("for-*"):
                path.unlink()
            made.servers["b"]._limit = 1 << 20
            made.servers["b"]._keepers.clear()
        return before + saves(tier, exchange.rank, 2)

    (first, second), _ = world(2, act)
    assert first.committed
    assert (second.committed, second.copy_failed, second.cause) == (False, True, "Full")


def test_copies_for_who_sends_elsewhere_make_room_for_others(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("abc", limit=10 << 20)
    world(3, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2))
    made.lose("c")  # the copies of b were there, and a has those of c
    made.names, made.at = "ab", {name: made.at[name] for name in "ab"}

    def again(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        return [tier.save(snapshot_of(step, exchange.rank, AttemptId(1, 2)), TERMS) for step in (3, 4, 5)]

    results = world(2, again)
    assert all(result.committed for mine in results for result in mine), results
    assert read(made.stores("a"), CheckpointName(step=5, pair=AttemptId(1, 2))) == tensors(5)
    assert len(list(made.folders["a"].glob("for-*.slot-?"))) == 3, "of what was kept for c, only the newest is left"


FOUR_SLOTS = 4 * (2 << 20)  # of a half of the state


def test_after_a_pod_was_replaced_four_slots_are_enough_and_what_is_gone_on_from_stays_until_the_next_commit(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("abc", limit=FOUR_SLOTS)
    at, made.names = made.at, "ab"
    made.at = {name: at[name] for name in "ab"}
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2))
    assert sum(path.stat().st_size for path in made.folders["a"].glob("*.slot-?")) == FOUR_SLOTS
    made.lose("b")  # what a keeps for it is half of step 2
    made.names, made.at = "ac", {name: at[name] for name in "ac"}

    def again(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        tier.restored(CheckpointName(step=2, pair=FIRST))
        first = tier.save(snapshot_of(3, exchange.rank, AttemptId(1, 2)), TERMS)
        exchange.gather(None)
        if exchange.rank == 0:
            assert read(made.stores("a"), CheckpointName(step=2, pair=FIRST)) == tensors(2)
        exchange.gather(None)
        return [first, *(tier.save(snapshot_of(step, exchange.rank, AttemptId(1, 2)), TERMS) for step in (4, 5))]

    results = world(2, again)
    assert all(result.committed for mine in results for result in mine), results
    made.lose("c")
    for step in (4, 5):
        assert read(made.stores("a"), CheckpointName(step=step, pair=AttemptId(1, 2))) == tensors(step)


def test_copies_of_a_lost_neighbour_make_room_for_a_ranks_own_slots(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab", limit=FOUR_SLOTS)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2))
    made.lose("b")
    made.names, made.at = "a", {"a": made.at["a"]}

    def alone(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        tier.restored(CheckpointName(step=2, pair=FIRST))
        first = tier.save(snapshot_of(3, 0, AttemptId(1, 2)), TERMS)
        assert read(made.stores("a"), CheckpointName(step=2, pair=FIRST)) == tensors(2), "all of it is here"
        return [first, tier.save(snapshot_of(4, 0, AttemptId(1, 2)), TERMS)]

    (results,) = world(1, alone)
    assert all(result.committed for result in results), results
    assert read(made.stores("a"), CheckpointName(step=4, pair=AttemptId(1, 2))) == tensors(4)
    assert list(made.folders["a"].glob("for-*.slot-?")) == []


def test_bytes_that_change_on_the_way_are_no_copy_and_the_commit_before_stays(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = nodes("ab")
    sent = peers.send

    def act(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        good = saves(tier, exchange.rank, 1)
        exchange.gather(None)
        if exchange.rank == 0:
            monkeypatch.setattr(peers, "send", lambda *args, **more: sent(*args[:2], _flipped(args[2]), **more))
        exchange.gather(None)
        bad = saves(tier, exchange.rank, 2)
        monkeypatch.setattr(peers, "send", sent)
        return good + bad

    for good, bad in world(2, act):
        assert good.committed
        assert not bad.committed
        assert "chunk 0 did not arrive as it was sent" in bad.message
    assert read(made.stores("a"), CheckpointName(step=1, pair=FIRST)) == tensors(1)
    assert made.stores("a")[0].commits() == (CheckpointName(step=1, pair=AttemptId(1, 1)),)


def _flipped(places: list[FileRange]) -> list[FileRange]:
    first = bytearray(os.pread(places[0].fd, places[0].nbytes, places[0].offset))
    first[5000] ^= 1
    fd = os.memfd_create("flipped")
    os.write(fd, first)
    return [replace(places[0], fd=fd, offset=0), *places[1:]]


def test_a_sender_that_is_killed_in_the_middle_leaves_the_copies_before_and_the_next_one_has_its_place(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = nodes("ab")
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2))

    def killed(peer: Peer, copy: peers.Copy, places: list[FileRange], **_: Any) -> None:
        def some(wire: Any) -> None:
            wire.send_file(replace(places[0], nbytes=places[0].nbytes // 2))
            raise ConnectionError("killed")

        peer.ask({"op": "put", **copy.to_json()}, some)

    with monkeypatch.context() as patch:
        patch.setattr(peers, "send", killed)
        assert not any(one.committed for (one,) in world(2, lambda e: saves(made.tiers["ab"[e.rank]], e.rank, 3)))
    for at in "ab":
        assert read(made.stores(at), CheckpointName(step=2, pair=FIRST)) == tensors(2)
    assert all(one.committed for (one,) in world(2, lambda e: saves(made.tiers["ab"[e.rank]], e.rank, 4)))
    made.lose("a")
    assert read(made.stores("b"), CheckpointName(step=4, pair=FIRST)) == tensors(4)


def test_a_neighbour_that_falls_silent_fails_no_training_once_the_attempt_is_over(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def check() -> None:
        if over.is_set():
            raise PeerLostError("the attempt is over")

    peer = Peer(Neighbour(node="b", pod="b", host="127.0.0.1", port=silent.getsockname()[1]), KEY, check)
    over.set()
    with pytest.raises(PeerLostError):
        peer.ask({"op": "list", "jobs": None})
    silent.close()


@pytest.mark.parametrize("asked", [1, 3])
def test_a_rank_asks_one_other_node_for_no_more_at_once_than_it_is_let(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], asked: int
) -> None:
    made = nodes("ab", in_flight=asked)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1))
    (there,) = made.tiers["a"].tier._peers.values()
    now, most, lock, all_there = [0], [0], threading.Lock(), threading.Barrier(asked)

    def count(wire: Any) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        all_there.wait(timeout=240)
        with lock:
            now[0] -= 1

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: there.ask({"op": "list", "jobs": None}, count), range(6)))
    assert len(answers) == 6
    assert most == [asked]


def test_who_lacks_the_key_reads_nothing(nodes: Callable[..., Nodes]) -> None:
    made = nodes("a")
    with pytest.raises(CheckpointError, match="a on a: "):
        Peer(made.at["a"], b"x" * 32).ask({"op": "list", "jobs": None})
    assert PeerStore(Peer(made.at["a"], b"x" * 32)).commits() == ()
    assert made.servers["a"].strangers >= 2


def test_silent_connections_keep_nobody_from_a_memory(nodes: Callable[..., Nodes]) -> None:
    made = nodes("a")
    server = made.servers["a"]
    with contextlib.ExitStack() as kept:
        for _ in range(100):
            kept.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert Peer(made.at["a"], KEY).ask({"op": "list", "jobs": None}) == {"commits": []}
        assert server.strangers >= 100 - 64


@pytest.mark.parametrize(("sent", "strangers"), [(b"", 0), (b"x", 1)])
def test_a_probe_of_the_port_is_no_stranger_and_a_wrong_byte_is(
    nodes: Callable[..., Nodes], sent: bytes, strangers: int
) -> None:
    server = nodes("a").servers["a"]
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    assert server.strangers == strangers


def drip(stranger: socket.socket) -> None:
    for _ in range(1000):
        stranger.sendall(b"{")
        time.sleep(0.02)


def test_a_stranger_who_drips_bytes_is_hung_up_on(
    nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = nodes("a")
    address = ("127.0.0.1", made.at["a"].port)
    with monkeypatch.context() as hasty:
        hasty.setattr(peer_server, "GREETING_SECONDS", 0.2)
        with socket.create_connection(address, timeout=240) as stranger:
            stranger.sendall(b"\0\0\4\0")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                drip(stranger)
    assert Peer(made.at["a"], KEY).ask({"op": "list", "jobs": None}) == {"commits": []}


def test_what_a_holder_of_the_key_says_wrong_ends_its_connection_and_no_other(nodes: Callable[..., Nodes]) -> None:
    made = nodes("a")
    wrong: list[dict[str, Any]] = [
        {},
        {"op": "put", "owner": "../x", "name": "step-1.g1.a1", "files": {}, "keep": [], "room": 1, "job": ""},
        {"op": "put", "owner": "x", "name": "step-1.g1.a1", "files": [], "keep": [], "room": 1, "job": ""},
        {"op": "read", "name": 5, "file": None, "offset": -1, "bytes": "x", "jobs": 3},
    ]
    for request in wrong:
        with pytest.raises(CheckpointError):
            Peer(made.at["a"], KEY).ask(request)
    assert Peer(made.at["a"], KEY).ask({"op": "list", "jobs": None}) == {"commits": []}
    assert list(made.folders["a"].iterdir()) == []


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 4)), min_size=1, unique=True))
def test_copies_go_to_another_node_whenever_there_is_one(members: list[tuple[str, int]]) -> None:
    everyone = [Neighbour(node=node, pod=str(pod), host="", port=0) for node, pod in members]
    for me in everyone:
        target = successor(everyone, me)
        if len({one.node for one in everyone}) == 1:
            assert target is None
        else:
            assert target in everyone
            assert target is not None
            assert target.node != me.node
