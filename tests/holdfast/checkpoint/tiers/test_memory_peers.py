"""Copies between nodes: corrupt bytes, lost senders, unauthorised clients."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_nodes import FIRST, KEY, Nodes, read, saves, tensors

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.checkpoint.stores.memory import peer_client as peers
from holdfast.checkpoint.stores.memory import peer_server
from holdfast.checkpoint.stores.memory.peer_client import Neighbour, Peer, PeerStore, successor
from holdfast.checkpoint.stores.memory.slot import FileRange
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, PeerLostError


def test_bytes_changed_in_transit_make_no_copy(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous copy stays."""
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
        assert "chunk 0 was corrupted in transfer" in bad.message
    assert read(made.stores("a"), CheckpointName(step=1, attempt_id=FIRST)) == tensors(1)
    assert made.stores("a")[0].commits() == (CheckpointName(step=1, attempt_id=AttemptId(1, 1)),)


def _flipped(places: list[FileRange]) -> list[FileRange]:
    first = bytearray(os.pread(places[0].fd, places[0].nbytes, places[0].offset))
    first[5000] ^= 1
    fd = os.memfd_create("flipped")
    os.write(fd, first)
    return [replace(places[0], fd=fd, offset=0), *places[1:]]


def test_killed_sender_leaves_old_copies_and_its_slot_is_reused(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = nodes("ab")
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2))

    def killed(peer: Peer, copy: peers.Copy, places: list[FileRange], **_: Any) -> None:
        def some(wire: Any) -> None:
            wire.send_file(replace(places[0], nbytes=places[0].nbytes // 2))
            raise ConnectionError("killed")

        peer.call({"op": "put", **copy.to_json()}, some)

    with monkeypatch.context() as patch:
        patch.setattr(peers, "send", killed)
        assert not any(one.committed for (one,) in world(2, lambda e: saves(made.tiers["ab"[e.rank]], e.rank, 3)))
    for at in "ab":
        assert read(made.stores(at), CheckpointName(step=2, attempt_id=FIRST)) == tensors(2)
    assert all(one.committed for (one,) in world(2, lambda e: saves(made.tiers["ab"[e.rank]], e.rank, 4)))
    made.lose("a")
    assert read(made.stores("b"), CheckpointName(step=4, attempt_id=FIRST)) == tensors(4)


def test_silent_peer_fails_no_training_after_the_attempt_ended(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def check() -> None:
        if over.is_set():
            raise PeerLostError("the attempt is over")

    peer = Peer(Neighbour(node="b", pod="b", host="127.0.0.1", port=silent.getsockname()[1]), KEY, check)
    over.set()
    with pytest.raises(PeerLostError):
        peer.call({"op": "list", "jobs": None})
    silent.close()


@pytest.mark.parametrize("asked", [1, 3])
def test_rank_asks_one_node_for_no_more_than_its_limit_at_once(
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
        answers = list(pool.map(lambda _: there.call({"op": "list", "jobs": None}, count), range(6)))
    assert len(answers) == 6
    assert most == [asked]


def test_who_lacks_the_key_reads_nothing(nodes: Callable[..., Nodes]) -> None:
    made = nodes("a")
    with pytest.raises(CheckpointError, match="a on a: "):
        Peer(made.at["a"], b"x" * 32).call({"op": "list", "jobs": None})
    assert PeerStore(Peer(made.at["a"], b"x" * 32)).commits() == ()
    assert made.servers["a"].rejected >= 2


def test_silent_connections_keep_nobody_from_a_memory(nodes: Callable[..., Nodes]) -> None:
    made = nodes("a")
    server = made.servers["a"]
    with contextlib.ExitStack() as kept:
        for _ in range(100):
            kept.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert Peer(made.at["a"], KEY).call({"op": "list", "jobs": None}) == {"commits": []}
        assert server.rejected >= 100 - 64


@pytest.mark.parametrize(("sent", "rejected"), [(b"", 0), (b"x", 1)])
def test_a_probe_of_the_port_is_no_stranger_and_a_wrong_byte_is(
    nodes: Callable[..., Nodes], sent: bytes, rejected: int
) -> None:
    server = nodes("a").servers["a"]
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    assert server.rejected == rejected


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
        hasty.setattr(peer_server, "HANDSHAKE_SECONDS", 0.2)
        with socket.create_connection(address, timeout=240) as stranger:
            stranger.sendall(b"\0\0\4\0")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                drip(stranger)
    assert Peer(made.at["a"], KEY).call({"op": "list", "jobs": None}) == {"commits": []}


def test_invalid_request_with_a_valid_key_ends_one_connection(nodes: Callable[..., Nodes]) -> None:
    made = nodes("a")
    wrong: list[dict[str, Any]] = [
        {},
        {"op": "put", "owner": "../x", "name": "step-1.g1.a1", "files": {}, "keep": [], "room": 1, "job": ""},
        {"op": "put", "owner": "x", "name": "step-1.g1.a1", "files": [], "keep": [], "room": 1, "job": ""},
        {"op": "read", "name": 5, "file": None, "offset": -1, "bytes": "x", "jobs": 3},
    ]
    for request in wrong:
        with pytest.raises(CheckpointError):
            Peer(made.at["a"], KEY).call(request)
    assert Peer(made.at["a"], KEY).call({"op": "list", "jobs": None}) == {"commits": []}
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
