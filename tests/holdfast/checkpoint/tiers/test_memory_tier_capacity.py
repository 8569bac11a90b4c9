"""Capacity of the memory tier: what does not fit, and which copies are overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memory_nodes import FIRST, KEY, TERMS, Nodes, read, saves, snapshot_of, tensors

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.core.attempt import AttemptId


def test_too_little_memory_is_refused_at_the_first_checkpoint(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("a", limit=4 << 20)
    ((result,),) = world(1, lambda exchange: saves(made.tier(exchange), 0, 1))
    assert (result.committed, result.full, result.cause) == (False, True, "Full")
    assert result.message.startswith("rank 0: the memory tier is too small: own-0 needs two slots of")


def test_too_little_memory_of_a_peer_is_refused_at_the_first_one(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab")
    made.servers["b"].close()
    too_little = 2 << 20  # for two slots, even if the copy comes before the slots of b's own rank
    server = made.servers["b"] = PeerServer(made.folders["b"], host="127.0.0.1", limit=too_little)
    server.key = KEY
    made.move("b", server.port)
    for (result,) in world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1)):
        assert (result.committed, result.full, result.cause) == (False, True, "Full")
        assert result.message.startswith("rank 0: b on b: the memory tier is too small: for-")


def test_unreachable_peer_fails_the_first_copy_not_the_training(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab")
    made.servers["b"].close()
    (first,), (second,) = world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1))
    assert not first.committed
    assert first == second
    assert "rank 0: b on b: " in first.message
    assert (first.copy_failed, first.cause) == (True, "Network"), "what is in this memory was not at fault"


def test_full_peer_memory_is_reported_as_a_failed_copy(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    """The first checkpoint fitted, and a later one does not."""
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
    made.lose("c")  # it had the copies of b, and a has those of c
    made.names, made.at = "ab", {name: made.at[name] for name in "ab"}

    def again(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        return [tier.save(snapshot_of(step, exchange.rank, AttemptId(1, 2)), TERMS) for step in (3, 4, 5)]

    results = world(2, again)
    assert all(result.committed for mine in results for result in mine), results
    assert read(made.stores("a"), CheckpointName(step=5, attempt_id=AttemptId(1, 2))) == tensors(5)
    assert len(list(made.folders["a"].glob("for-*.slot-?"))) == 3, "of what was kept for c, only the newest is left"


FOUR_SLOTS = 4 * (2 << 20)  # of one half of the state


def test_four_slots_suffice_after_a_pod_was_replaced(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    """The state that training resumed from stays until the next checkpoint."""
    made = nodes("abc", limit=FOUR_SLOTS)
    at, made.names = made.at, "ab"
    made.at = {name: at[name] for name in "ab"}
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2))
    assert sum(path.stat().st_size for path in made.folders["a"].glob("*.slot-?")) == FOUR_SLOTS
    made.lose("b")  # the copy on node a is half of step 2
    made.names, made.at = "ac", {name: at[name] for name in "ac"}

    def again(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        tier.restored(CheckpointName(step=2, attempt_id=FIRST))
        first = tier.save(snapshot_of(3, exchange.rank, AttemptId(1, 2)), TERMS)
        exchange.gather(None)
        if exchange.rank == 0:
            assert read(made.stores("a"), CheckpointName(step=2, attempt_id=FIRST)) == tensors(2)
        exchange.gather(None)
        return [first, *(tier.save(snapshot_of(step, exchange.rank, AttemptId(1, 2)), TERMS) for step in (4, 5))]

    results = world(2, again)
    assert all(result.committed for mine in results for result in mine), results
    made.lose("c")
    for step in (4, 5):
        assert read(made.stores("a"), CheckpointName(step=step, attempt_id=AttemptId(1, 2))) == tensors(step)


def test_copies_of_a_lost_peer_free_memory_for_own_slots(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab", limit=FOUR_SLOTS)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2))
    made.lose("b")
    made.names, made.at = "a", {"a": made.at["a"]}

    def alone(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        tier.restored(CheckpointName(step=2, attempt_id=FIRST))
        first = tier.save(snapshot_of(3, 0, AttemptId(1, 2)), TERMS)
        assert read(made.stores("a"), CheckpointName(step=2, attempt_id=FIRST)) == tensors(2), "all of it is here"
        return [first, tier.save(snapshot_of(4, 0, AttemptId(1, 2)), TERMS)]

    (results,) = world(1, alone)
    assert all(result.committed for result in results), results
    assert read(made.stores("a"), CheckpointName(step=4, attempt_id=AttemptId(1, 2))) == tensors(4)
    assert list(made.folders["a"].glob("for-*.slot-?")) == []
