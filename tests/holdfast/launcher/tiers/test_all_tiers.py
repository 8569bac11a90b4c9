"""All tiers of one job: memory and a peer copy at each step, and deltas in a folder.

Each shard of the model is in the memory of one rank only. After any loss, the state equals the last one bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.checkpoint.folder.catalog import list_commits, read_manifest
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.core.attempt import AttemptId
from holdfast.fault_injection.injector import PLAN_FILE
from holdfast.fault_injection.plan import Fault, Kind
from holdfast.telemetry.activity import Activity

Wait = Callable[..., Any]
WorldPair = tuple[int, int]
PROCESSES = 2
DURABLE_EVERY = 5


class Found(NamedTuple):
    """What a world resumed from: its step, and the last step for which `job.step` had returned on any rank."""

    step: int
    returned: int


class Job:
    """Pods on separate nodes, each with the memory of its node, and the states that their ranks reported."""

    def __init__(self, cluster: Any, wait_for: Wait, **environ: str) -> None:
        self.cluster, self._wait, self._environ = cluster, wait_for, environ
        self.folder = cluster.shared / "checkpoints"
        self._members: tuple[str, ...] = ()
        cluster.settings |= {"processesPerWorker": PROCESSES, "replicas": 2, "minReplicas": 2, "budgets": []}
        cluster.settings["checkpoint"] |= {"interval": str(DURABLE_EVERY), "fullEvery": 100}

    def start(self, name: str) -> Any:
        (pod,) = self.cluster.start(
            name,
            script="shards.py",
            HOLDFAST_CHECKPOINT_DIR=str(self.folder),
            HOLDFAST_MEMORY_TIER=str(self._memory(name)),
            HOLDFAST_PEER_INTERVAL="1",
            **self._environ,
        )
        return pod

    def replace(self, generation: int, after: WorldPair, *names: str, gone: tuple[str, ...]) -> WorldPair:
        """Publish the next generation with other pods in place of the lost ones, as the operator does."""
        before = [f"uid-{name}" for name in self._members]
        previous = [{"generation": after[0], "publication": f"p{after[0]}", "members": before}]
        claims = [json.loads(file.read_text()) for file in (self.folder / "claims").glob("*.json")]
        active = {"generation": after[0], "attempt": after[1]}
        return self.publish(
            generation, *names, active=active, previous=previous, gone=[f"uid-{name}" for name in gone], claims=claims
        )

    def publish(self, generation: int, *names: str, **changes: Any) -> WorldPair:
        self._members = names
        self.cluster.publish(generation, *names, **changes)
        attempt_id: WorldPair = self.cluster.await_world(generation, *names)
        return attempt_id

    def lose_nodes(self, *names: str) -> None:
        """Lose launchers, ranks and memory at once."""
        for name in names:
            self.cluster.pods[name].process.kill()
        for name in names:
            self.cluster.pods.pop(name).stop()
            shutil.rmtree(self._memory(name))

    def found(self, attempt_id: WorldPair) -> Found:
        """Wait until all ranks of a world have found the same step, each shard as it was when that step was
        applied."""
        size = PROCESSES * len(self._members)
        here = self._wait(
            lambda: (own := self._said("found", attempt_id)) and len(own) >= size and own, self.cluster.tail
        )
        (step,) = {one["step"] for one in here}
        made = defaultdict(set)
        for one in self._said("applied"):
            if tuple(one["pair"]) < attempt_id:
                made[one["step"], one["shard"]].add(one["digest"])
        assert {one["shard"] for one in here} == set(range(size))
        for one in here:
            assert made[step, one["shard"]] == {one["digest"]}, f"shard {one['shard']} of step {step} is another"
        returned = max(one["step"] for one in self._said("returned") if tuple(one["pair"]) < attempt_id)
        return Found(step=step, returned=returned)

    def goes_on(self, attempt_id: WorldPair, steps: int) -> None:
        """Continue for this number of steps. Repeated steps have the same result as the first time."""
        begun = self.found(attempt_id).step
        (first, *_) = (self.cluster.pods[name] for name in self._members)
        self._wait(lambda: first.world == attempt_id and first.step >= begun + steps, self.cluster.tail)
        made = defaultdict(set)
        for one in self._said("applied"):
            made[one["step"], one["shard"]].add(one["digest"])
        assert all(len(digests) == 1 for digests in made.values())

    def ranks(self, attempt_id: WorldPair) -> list[int]:
        """Return the processes of a world."""
        return sorted(one["pid"] for one in self._said("found", attempt_id))

    def durable(self) -> list[Manifest]:
        """Return the checkpoints in the folder, oldest first."""
        return [read_manifest(self.folder, name) for name in sorted(list_commits(self.folder), key=lambda n: n.step)]

    def restored_from(self, pod: Any, number: int) -> str:
        """Return the source of the state after that incident, as reported by its launcher."""
        incident = self._wait(lambda: _resumed(pod.status.get("incidents", ()), number), self.cluster.tail)
        assert incident["lostSteps"] <= 1, "but for a step that no rank had returned from"
        return str(incident["restoredFrom"])

    def _said(self, kind: str, attempt_id: WorldPair | None = None) -> list[dict[str, Any]]:
        """Return complete lines only, since a rank may be writing one."""
        texts = [file.read_text() for file in self.cluster.shared.glob("states-*")]
        lines = [json.loads(line) for text in texts for line in text.split("\n")[:-1]]
        return [one for one in lines if one["kind"] == kind and attempt_id in (None, tuple(one["pair"]))]

    def _memory(self, name: str) -> Path:
        return memory_of(self.cluster, name)


def _resumed(incidents: Sequence[dict[str, Any]], number: int) -> dict[str, Any] | None:
    known = incidents[number] if len(incidents) > number else None
    return known if known and known["resumedTime"] else None


def memory_of(cluster: Any, name: str) -> Path:
    """Return the memory of a pod's node."""
    return Path(cluster.shared.parent / f"memory-{name}")


@pytest.mark.thorough
def test_losses_of_a_rank_a_node_and_both_nodes_keep_all_bits(cluster: Any, wait_for: Wait) -> None:
    """The rank dies when it starts to save in memory what all ranks have applied, and before `job.step` has
    returned."""
    chaos = cluster.shared / "chaos"
    chaos.mkdir()
    dies = Fault(number=1, kind=Kind.KILL, rank=1, step=13, at=Activity.CHECKPOINT)
    (chaos / PLAN_FILE).write_text(json.dumps([dies.to_json()]))
    job = Job(cluster, wait_for, HOLDFAST_CHAOS=str(chaos))
    a, _ = job.start("a"), job.start("b")
    first = job.publish(1, "a", "b")

    second = cluster.await_world(1, "a", "b", above=first)
    rank = job.found(second)
    assert rank.step == rank.returned, "what no rank had returned from was in no slot yet"
    assert set(job.restored_from(a, 0).split(", ")) <= {"memory", "peer"}, "the folder has an older one"
    job.goes_on(second, 3 * DURABLE_EVERY)
    assert job.durable()[-1].depends_on, "a delta"

    job.lose_nodes("b")
    job.start("c")
    third = job.replace(2, second, "a", "c", gone=("b",))
    node = job.found(third)
    assert node.returned <= node.step <= node.returned + 1, "no step that any rank had returned from is lost"
    assert set(job.restored_from(a, 1).split(", ")) == {"memory", "peer"}
    job.goes_on(third, 3 * DURABLE_EVERY)

    job.lose_nodes("a", "c")
    newest = job.durable()[-1]
    assert newest.depends_on, "a delta"
    job.start("d")
    job.start("e")
    fourth = job.replace(3, third, "d", "e", gone=("a", "c"))
    both = job.found(fourth)
    assert both.step == newest.step, "what lay in memory only is lost with both nodes, and nothing else"
    assert both.returned - both.step <= 2 * DURABLE_EVERY
    job.goes_on(fourth, 3)


@pytest.mark.thorough
def test_ranks_killed_at_any_moment_lose_no_returned_step(cluster: Any, wait_for: Wait) -> None:
    """In its forward pass, its vote, or while a checkpoint is created, sent, sealed or read."""
    chance = random.Random(7)
    job = Job(cluster, wait_for, WARM="2")
    a, _ = job.start("a"), job.start("b")
    attempt_id = job.publish(1, "a", "b")
    wait_for(lambda: a.step > DURABLE_EVERY, cluster.tail)
    for _ in range(10):
        time.sleep(chance.uniform(0.05, 0.5))
        os.kill(chance.choice(job.ranks(attempt_id)), signal.SIGKILL)
        attempt_id = cluster.await_world(1, "a", "b", above=attempt_id)
        found = job.found(attempt_id)
        assert found.returned <= found.step <= found.returned + 1, cluster.tail()
        job.goes_on(attempt_id, 1)


@pytest.mark.thorough
def test_notice_copies_the_last_step_to_another_node(cluster: Any, wait_for: Wait) -> None:
    """No copy is due at that step. The log states the reason."""
    every = {
        "HOLDFAST_CHECKPOINT_DIR": str(cluster.shared / "checkpoints"),
        "HOLDFAST_MEMORY_INTERVAL": "200",
        "HOLDFAST_PEER_INTERVAL": "200",
    }
    for name in "abc":
        cluster.start(name, script="trains.py", HOLDFAST_MEMORY_TIER=str(memory_of(cluster, name)), **every)
    c = cluster.pods["c"]
    cluster.publish(1, "a", "b", "c")
    attempt_id = cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: c.step > 205, "a commit in memory has been measured")
    notice = {"version": 1, "id": "spot-1", "reason": "spot terminate", "source": "AWS", "drain": True}
    (c.run_dir / "wish").write_text(json.dumps(notice))
    (c.run_dir / "wish").rename(c.run_dir / "emergency_checkpoint")
    assert c.wait() == 75, cluster.tail()
    last = json.loads((c.run_dir / "emergency_checkpoint.ack").read_text())["step"]
    assert last % 200, "not due in memory"
    assert c.status["checkpoints"]["memory"]["step"] == last, cluster.tail()
    told = re.findall(r"the last checkpoint is saved on (.*?): .*? s are usable.*?\((.*)\)", c.log.read_text())
    assert [chosen for chosen, _ in told] == ["memory and peer and shared"], cluster.tail()
    figures = r"memory: done in \d.* s, and lost with node node-c; peer: done in \d.* s; shared: done in \d.* s"
    assert re.fullmatch(figures, told[0][1]), told
    (there,) = memory_of(cluster, "a").glob("launcher-*")  # the next node by name
    with MemoryStore(there).open(
        CheckpointName(step=last, attempt_id=AttemptId(*attempt_id)), "rank-2.safetensors"
    ) as copy:
        assert copy.nbytes > 0
