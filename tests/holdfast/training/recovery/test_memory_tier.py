"""A model without replicas: state that no rank has in memory is restored from the memory of the nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.tiers.settings import TierSettings

SCRIPT = Path(__file__).parents[1] / "scripts" / "sharded.py"
STEPS = 10
HELD_AT = 6
KEY = b"k" * 32


class Nodes:
    """The memory of each slot's launcher, on a node of its own."""

    def __init__(self, launcher: Any, root: Path) -> None:
        self._launcher = launcher
        self._root = root
        self.servers: dict[int, PeerServer] = {}

    def add(self, slot: int) -> None:
        folder = self._root / f"node-{slot}"
        folder.mkdir()
        server = self.servers[slot] = PeerServer(folder, host="127.0.0.1")
        server.key = KEY
        self._launcher.tiers.setdefault(slot, {})["memory"] = TierSettings(
            folder=folder,
            limit=None,
            interval=1,
            peer_interval=1,
            per_second=None,
            me=Neighbour(node=f"node-{slot}", pod=f"pod-{slot}", host="127.0.0.1", port=server.port),
            key=KEY,
        ).to_json()

    def lose(self, slot: int) -> None:
        self.servers.pop(slot).close()
        folder = self._root / f"node-{slot}"
        while folder.exists():  # a rank that serves another node may still create a file
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


@pytest.fixture
def nodes(launcher: Any, tmp_path: Path) -> Iterator[Nodes]:
    launcher.script = SCRIPT
    made = Nodes(launcher, tmp_path)
    yield made
    made.close()


def kept(launcher: Any, slot: int) -> int:
    """Return the last step that this rank reported as saved in memory."""
    said = [message for message in launcher.of(slot, "checkpoint") if message["tier"] == "memory"]
    assert all(message["result"] == "Committed" for message in said), said
    return max((message["step"] for message in said), default=0)


def begun(launcher: Any, nodes: Nodes, root: Path) -> None:
    """Start one replica of two ranks on two nodes, without a checkpoint on the shared tier, as the interval is long.

    The ranks are held at a step, so that a slower test finds them there.
    """
    for slot in (0, 1):
        nodes.add(slot)
    launcher.start(2, root, "--steps", str(STEPS), "--pause", "0.05", "--hold-at", str(HELD_AT))
    launcher.wait("three steps in memory", lambda: min(kept(launcher, slot) for slot in (0, 1)) >= 3)


def test_last_staged_step_survives_the_death_of_all_ranks(launcher: Any, nodes: Nodes, tmp_path: Path) -> None:
    begun(launcher, nodes, tmp_path / "tier")
    for slot in (0, 1):
        launcher.lose(slot)
    last = max(kept(launcher, slot) for slot in (0, 1))
    assert not list((tmp_path / "tier").glob("step-*")), "nothing is on the shared tier"
    for before, slot in enumerate((2, 3)):
        launcher.tiers[slot] = launcher.tiers[before]
    launcher.form(2, [2, 3])
    went_on(launcher, last, 2, 3)


def test_node_lost_with_its_memory_costs_no_completed_step(launcher: Any, nodes: Nodes, tmp_path: Path) -> None:
    begun(launcher, nodes, tmp_path / "tier")
    lost, stays = 0, 1
    launcher.lose(lost)
    nodes.lose(lost)
    launcher.leave(1, stays)
    launcher.wait("the other to leave", lambda: bool(launcher.of(stays, "left")))
    last = max(kept(launcher, slot) for slot in (0, 1))
    nodes.add(2)
    launcher.form(2, [stays, 2])
    went_on(launcher, last, stays, 2)


def went_on(launcher: Any, last: int, *slots: int) -> None:
    """Assert that training resumed from the last step saved in memory, or from one that was sealed and not
    reported yet."""
    launcher.go(HELD_AT)
    assert all(launcher.processes[slot].wait() == 0 for slot in slots), launcher.output()
    for slot in slots:
        restored = launcher.of(slot, "restored")[-1]
        assert restored["source"] == "checkpoint"
        assert "memory" in restored["tiers"]
        assert set(restored["tiers"]) <= {"memory", "peer"}
        assert last <= restored["step"] <= last + 1
        assert launcher.told(slot)["audit"].startswith("exactly once")


@pytest.mark.thorough
def test_nothing_is_lost_where_memory_has_an_interval(launcher: Any, nodes: Nodes, tmp_path: Path) -> None:
    """Steps since the last one in memory are repeated, and every sample still counts once."""
    for slot in (0, 1):
        nodes.add(slot)
        launcher.tiers[slot]["memory"]["interval"] = 3
    launcher.start(2, tmp_path / "tier", "--steps", str(STEPS), "--faults", "forward:1:7")
    launcher.processes.pop(1).wait()
    launcher.leave(1, 0)
    launcher.wait("the other to leave", lambda: bool(launcher.of(0, "left")))
    launcher.tiers[2] = launcher.tiers[1]
    launcher.form(2, [0, 2])
    went_on(launcher, 6, 0, 2)


@pytest.mark.thorough
def test_final_checkpoint_is_copied_when_requested_and_not_due(launcher: Any, nodes: Nodes, tmp_path: Path) -> None:
    """The worker of rank 1 leaves with its node, and the shared tier loses everything."""
    for slot in (0, 1):
        nodes.add(slot)
        launcher.tiers[slot]["memory"] |= {"interval": 1000, "peerInterval": 1000}
    launcher.start(2, tmp_path / "tier", "--steps", "60", "--hold-at", str(HELD_AT))
    launcher.wait("two steps", lambda: len(launcher.of(0, "step")) >= 2)
    launcher.ask(1, "quiesce", "notice", commit=True, near=True)
    launcher.go(HELD_AT)
    launcher.wait("the end", lambda: all(launcher.of(slot, "quiesced") for slot in (0, 1)))
    last = launcher.of(0, "quiesced")[-1]["step"]
    assert [kept(launcher, slot) for slot in (0, 1)] == [last, last]
    launcher.lose(1)
    nodes.lose(1)
    for commit in (tmp_path / "tier").glob("step-*"):
        shutil.rmtree(commit)
    nodes.add(2)
    for slot in (0, 2):
        launcher.tiers[slot]["memory"] |= {"interval": 1000, "peerInterval": 1000}
    launcher.form(2, [0, 2])
    went_on(launcher, last, 0, 2)


def test_without_that_only_the_shared_tier_has_it(launcher: Any, nodes: Nodes, tmp_path: Path) -> None:
    for slot in (0, 1):
        nodes.add(slot)
        launcher.tiers[slot]["memory"] |= {"interval": 1000, "peerInterval": 1000}
    launcher.start(2, tmp_path / "tier", "--steps", "60", "--hold-at", str(HELD_AT))
    launcher.wait("two steps", lambda: len(launcher.of(0, "step")) >= 2)
    launcher.ask(1, "quiesce", "notice", commit=True, near=False)
    launcher.go(HELD_AT)
    launcher.wait("the end", lambda: all(launcher.of(slot, "quiesced") for slot in (0, 1)))
    assert [kept(launcher, slot) for slot in (0, 1)] == [0, 0]
    assert len(list((tmp_path / "tier").glob("step-*"))) == 1
