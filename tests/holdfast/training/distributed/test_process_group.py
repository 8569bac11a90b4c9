"""Collectives among real processes: their results, and the exit from them when a peer is lost."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from holdfast.core.connections import own_address
from holdfast.core.errors import PeerLostError
from holdfast.training.distributed import process_group
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.process_group import Group

CPU = torch.device("cpu")
OPERATIONS = ["sum", "agree", "broadcast", "gather", "share", "send", "receive", "barrier", "backward"]


def test_every_rank_hears_the_same(members: Any) -> None:
    for rank, heard in enumerate(members.play("exchange", size=3)):
        assert heard["gathered"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}, {"rank": 2, "text": "xx"}]
        assert heard["shared"] == [0, 1]
        assert heard["maximum"] == 2.0
        assert heard["broadcast"] == [1.0] * 3
        assert heard["odd"], "a type or a layout that gloo does not know came out wrong"
        assert heard["passed"] == [float((rank - 1) % 3)] * 5


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_peer_is_noticed_without_being_told(members: Any, operation: str) -> None:
    (survivor,) = members.play(operation, size=2, fault="killed")
    assert survivor["raised"] == "PeerLostError"
    assert "over" not in survivor["message"]
    assert survivor["total"] == 1.0


@pytest.mark.parametrize("fault", ["stopped", "asleep"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_silent_peer_is_left_as_soon_as_the_attempt_is_over(members: Any, operation: str, fault: str) -> None:
    for survivor in members.play(operation, size=3, fault=fault):
        assert survivor["raised"] == "PeerLostError"
        assert survivor["message"] == "the attempt is over: a peer is silent"
        assert survivor["total"] == 3.0, "the survivors did not meet again"


def test_absent_peer_is_not_waited_for_after_the_attempt(members: Any) -> None:
    for survivor in members.play("meet", size=3, fault="asleep"):
        assert survivor["message"] == "the attempt is over: a peer is silent"
        assert survivor["total"] == 3.0


def test_backward_itself_raises_nothing(members: Any) -> None:
    (survivor,) = members.play("backward", size=2, fault="killed")
    assert survivor["after"] == "backward"
    assert survivor["raised"] == "PeerLostError"


def test_ranks_that_do_not_meet_in_time_say_so(store: int) -> None:
    with pytest.raises(PeerLostError, match=r"not every rank arrived within 0\.2 s|[Tt]ime"):
        _connect(store, CancelToken(), timeout=0.2)


def test_a_world_whose_store_is_gone_is_not_entered() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    cancel = CancelToken()
    threading.Timer(0.1, cancel.set, ("told",)).start()
    with pytest.raises(PeerLostError):
        _connect(port, cancel, timeout=60)


def test_an_attempt_that_is_over_is_not_entered() -> None:
    cancel = CancelToken()
    cancel.set("first")
    cancel.set("second")
    with pytest.raises(PeerLostError, match="the attempt is over: first"):
        _connect(1, cancel, timeout=60)


def test_a_group_that_was_left_launches_nothing(store: int) -> None:
    cancel = CancelToken()
    groups = _both(store, cancel)
    groups[0].abandon()
    with pytest.raises(PeerLostError, match="left"):
        groups[0].sum_(torch.ones(1))
    groups[1].close()


def test_a_world_of_one_needs_nobody() -> None:
    group = Group.single_rank(CPU)
    numbers = torch.ones(3)
    group.sum_(numbers)
    group.broadcast_(numbers)
    group.barrier()
    assert (group.gather(5), group.share("x"), numbers.tolist()) == ([5], "x", [1.0, 1.0, 1.0])
    group.close()


def test_gloo_listens_on_the_way_to_the_store() -> None:
    assert own_address("127.0.0.1", 29400) == "127.0.0.1"


@pytest.mark.parametrize(("interface", "device"), [("", {"hostname": "127.0.0.1"}), ("lo", {"interface": "lo"})])
def test_ranks_meet_without_a_look_up_of_their_hosts_name(
    store: int, monkeypatch: pytest.MonkeyPatch, interface: str, device: dict[str, str]
) -> None:
    """The host name may have no address. Gloo resolves it only if it gets no device."""
    create, created = process_group.ProcessGroupGloo.create_device, []

    def record(**place: str) -> Any:
        created.append(place)
        return create(**place)

    monkeypatch.setattr(process_group.ProcessGroupGloo, "create_device", staticmethod(record))
    groups = _both(store, CancelToken(), interface=interface)
    assert created == [device, device]
    for group in groups.values():
        group.close()


@pytest.fixture
def store() -> Any:
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def _both(port: int, cancel: CancelToken, *, interface: str = "") -> dict[int, Group]:
    """Return the groups of two ranks that met, by rank."""
    groups: dict[int, Group] = {}

    def meet(rank: int) -> None:
        groups[rank] = _connect(port, cancel, rank, interface=interface)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def _connect(port: int, cancel: CancelToken, rank: int = 0, timeout: float = 240.0, interface: str = "") -> Group:
    return Group.connect(
        host="127.0.0.1",
        port=port,
        prefix="1.1",
        rank=rank,
        size=2,
        device=CPU,
        cancel=cancel,
        timeout=timeout,
        interface=interface,
    )
