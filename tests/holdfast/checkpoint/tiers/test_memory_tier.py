"""Checkpoints in the memory of several nodes survive the loss of ranks and of any one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from memory_nodes import FIRST, TERMS, Nodes, read, saves, snapshot_of, tensors

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.core.attempt import AttemptId, Claim


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_with_copies_the_last_step_survives_any_node_loss(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], lost: str
) -> None:
    made = nodes("abc")
    results = world(3, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2, 3))
    assert all(result.committed for mine in results for result in mine), results
    made.lose(lost)
    for at in made.folders:
        assert read(made.stores(at), CheckpointName(step=3, attempt_id=FIRST)) == tensors(3)
        assert read(made.stores(at), CheckpointName(step=2, attempt_id=FIRST)) == tensors(2)


@pytest.mark.parametrize("mebibytes", [4, 24], ids=["at once", "in batches"])
def test_non_finite_weights_on_one_rank_are_saved_on_none(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], mebibytes: int
) -> None:
    """The previous checkpoint stays."""
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
        assert MemoryStore(made.folders[at]).commits() == (CheckpointName(step=1, attempt_id=FIRST),)


def test_ranks_seal_one_manifest_with_different_failure_clocks(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    """Each rank counts failures by its own clock."""
    made = nodes("ab")

    def counted(exchange: Any) -> SaveResult:
        snapshot = snapshot_of(1, exchange.rank)
        snapshot = replace(snapshot, state={**snapshot.state, "failures": {"seconds": float(exchange.rank)}})
        return made.tier(exchange).save(snapshot, TERMS)

    assert all(result.committed for result in world(2, counted))
    name = CheckpointName(step=1, attempt_id=FIRST)
    manifests = [MemoryStore(made.folders[at]).manifest(name) for at in "ab"]
    assert manifests[0] == manifests[1]
    assert manifests[0].state["failures"] == {"seconds": 0.0}


def test_ranks_seal_one_manifest_with_different_mapping_orders(
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
        name = CheckpointName(step=step, attempt_id=FIRST)
        manifests = [MemoryStore(made.folders[at]).manifest(name) for at in "ab"]
        assert manifests[0] == manifests[1]
        assert manifests[0].objects == {"box": kept}


def test_tensors_with_new_dtypes_at_old_offsets_are_described(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    """The manifest states the dtypes of its own step."""
    made = nodes("ab", peer_interval=None)

    def both(exchange: Any) -> list[SaveResult]:
        tier, first = made.tier(exchange), snapshot_of(1, exchange.rank)
        specs = [replace(spec, dtype="I8") for spec in first.specs]
        second = replace(first, name=CheckpointName(step=2, attempt_id=FIRST), specs=specs)
        return [tier.save(snapshot, TERMS) for snapshot in (first, second)]

    assert all(result.committed for mine in world(2, both) for result in mine)
    kinds = [
        {record.dtype for record in MemoryStore(made.folders["a"]).manifest(name).tensors.values()}
        for name in (CheckpointName(step=1, attempt_id=FIRST), CheckpointName(step=2, attempt_id=FIRST))
    ]
    assert kinds == [{"U8"}, {"I8"}]


def test_without_copies_it_survives_all_processes_and_no_node(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab", peer_interval=None)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2))
    assert read(made.stores("a"), CheckpointName(step=2, attempt_id=FIRST)) == tensors(2)
    made.lose("b")
    with pytest.raises(AssertionError, match="nowhere"):
        read(made.stores("a"), CheckpointName(step=2, attempt_id=AttemptId(1, 1)))


def test_copies_have_an_interval_of_their_own(nodes: Callable[..., Nodes], world: Callable[..., list[Any]]) -> None:
    made = nodes("ab", peer_interval=2)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2, 3))
    made.lose("a")
    assert read(made.stores("b"), CheckpointName(step=2, attempt_id=FIRST)) == tensors(2)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("lost", "ab")
def test_requested_checkpoint_between_two_due_ones_is_copied(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], lost: str, interval: int
) -> None:
    """The checkpoint survives the loss of any one node."""
    made = nodes("ab", interval=interval, peer_interval=3)

    def last(exchange: Any) -> SaveResult:
        tier = made.tier(exchange)
        due = [step for step in range(1, 5) if tier.due_at(step)]
        assert all(tier.save(snapshot_of(step, exchange.rank), TERMS).committed for step in due)
        return tier.save(snapshot_of(5, exchange.rank), TERMS, requested=True)

    results = world(2, last)
    assert all(result.committed and result.nbytes and result.copying for result in results)
    made.lose(lost)
    (stays,) = made.folders
    for step in (3, 5):
        assert read(made.stores(stays), CheckpointName(step=step, attempt_id=FIRST)) == tensors(step)


@pytest.mark.parametrize("steps", [4, 5, 6, 7])
@pytest.mark.parametrize("lost", "ab")
def test_last_copied_step_survives_any_node_loss(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]], lost: str, steps: int
) -> None:
    """The number of later steps without a copy does not matter."""
    made = nodes("ab", peer_interval=3)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, *range(1, steps + 1)))
    made.lose(lost)
    (stays,) = made.folders
    last = steps - steps % 3
    assert read(made.stores(stays), CheckpointName(step=last, attempt_id=FIRST)) == tensors(last)


def test_last_copy_survives_a_resume_from_an_uncopied_step(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab", peer_interval=3)
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 1, 2, 3, 4))
    claim = Claim(attempt_id=AttemptId(1, 2), job_uid="job", publication="p", from_step=4, from_attempt_id=FIRST)

    def again(exchange: Any) -> list[SaveResult]:
        tier = made.tier(exchange)
        tier.restored(CheckpointName(step=4, attempt_id=FIRST))
        return [tier.save(snapshot_of(5, exchange.rank, AttemptId(1, 2)), replace(TERMS, claims=(claim,)))]

    world(2, again)
    made.lose("a")
    assert read(made.stores("b"), CheckpointName(step=3, attempt_id=FIRST)) == tensors(3)


def test_next_attempt_keeps_the_last_copy_when_no_copy_was_due(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab", peer_interval=10)

    def first(exchange: Any) -> SaveResult:
        saves(tier := made.tier(exchange), exchange.rank, 10, 11)
        return tier.save(snapshot_of(12, exchange.rank), TERMS, requested=True)

    assert all(result.committed for result in world(2, first))
    claim = Claim(attempt_id=AttemptId(1, 2), job_uid="job", publication="p", from_step=12, from_attempt_id=FIRST)

    def again(exchange: Any) -> None:
        tier = made.tier(exchange)
        tier.restored(CheckpointName(step=12, attempt_id=FIRST))
        for step in (13, 14, 15):
            snapshot = snapshot_of(step, exchange.rank, AttemptId(1, 2))
            assert tier.save(snapshot, replace(TERMS, claims=(claim,))).committed

    world(2, again)
    made.lose("a")
    assert read(made.stores("b"), CheckpointName(step=12, attempt_id=FIRST)) == tensors(12)


def test_the_next_attempt_spares_what_it_goes_on_from(
    nodes: Callable[..., Nodes], world: Callable[..., list[Any]]
) -> None:
    made = nodes("ab")
    world(2, lambda exchange: saves(made.tier(exchange), exchange.rank, 10, 11))
    claim = Claim(
        attempt_id=AttemptId(1, 2), job_uid="job", publication="p", from_step=10, from_attempt_id=AttemptId(1, 1)
    )
    first = Claim(attempt_id=AttemptId(1, 1), job_uid="job", publication="p", from_step=0)
    terms = replace(TERMS, claims=(first, claim))

    def again(exchange: Any) -> SaveResult:
        return made.tier(exchange).save(snapshot_of(11, exchange.rank, AttemptId(1, 2)), terms)

    assert all(result.committed for result in world(2, again))
    assert read(made.stores("a"), CheckpointName(step=10, attempt_id=FIRST)) == tensors(10)
    assert read(made.stores("b"), CheckpointName(step=11, attempt_id=AttemptId(1, 2))) == tensors(11)
