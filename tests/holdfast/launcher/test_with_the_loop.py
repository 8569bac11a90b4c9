"""The launcher and the training loop together, on a shared checkpoint folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool_bench import gone

from holdfast.checkpoint.folder.catalog import list_commits
from holdfast.fault_injection.injector import PLAN_FILE
from holdfast.fault_injection.plan import Fault, Kind
from holdfast.launcher.host.run_dir import TIMELINE_FILE
from holdfast.telemetry.activity import Activity

Wait = Callable[..., Any]


def claims(cluster: Any) -> dict[tuple[int, int], int]:
    """Return the step from which each attempt resumed."""
    files = sorted((cluster.shared / "checkpoints" / "claims").glob("*.json"))
    found = [json.loads(file.read_text()) for file in files]
    return {(claim["generation"], claim["attempt"]): claim["fromStep"] for claim in found}


def test_three_shrink_to_two_and_grow_to_three_without_loss(cluster: Any, wait_for: Wait) -> None:
    checkpoints = str(cluster.shared / "checkpoints")
    a, b, c = cluster.start("a", "b", "c", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints)
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: a.status.get("checkpoints"), "a first commit")
    c.process.kill()
    second = cluster.await_world(1, "a", "b", above=(1, 1))
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], "two go on")
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["action"]) == ("Infrastructure", "Shrink"), cluster.tail()
    assert incident["lostSteps"] is not None, str(incident) + cluster.tail()

    # When they have formed a world, the others wait for that rank until they have been observed.
    cluster.start("d", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints, LOADS_LATE="1")
    previous = [{"generation": 1, "publication": "p1", "members": ["uid-a", "uid-b", "uid-c"]}]
    active = {"generation": 1, "attempt": second[1]}
    known = [json.loads(file.read_text()) for file in (cluster.shared / "checkpoints" / "claims").glob("*.json")]
    cluster.publish(2, "a", "b", "d", active=active, previous=previous, gone=["uid-c"], claims=known)
    third = cluster.await_world(2, "a", "b", "d")
    reached = max(a.step, b.step)
    (cluster.shared / "load").touch()
    wait_for(lambda: cluster.pods["d"].step > reached, "three train")
    assert claims(cluster)[third] == reached, "growth goes on from the very step at which the two stopped"
    assert len(a.status["incidents"]) == 1


@pytest.mark.thorough
def test_a_growth_waits_for_the_end_of_a_save_and_loses_nothing(cluster: Any, wait_for: Wait) -> None:
    """Without the wait, ranks that leave during a save longer than `deadlineSeconds` would be killed."""
    cluster.settings["checkpoint"] = {**cluster.settings["checkpoint"], "interval": "50", "deadlineSeconds": 1}
    checkpoints = str(cluster.shared / "checkpoints")
    environ = {"HOLDFAST_CHECKPOINT_DIR": checkpoints, "COMPARES": "0"}
    a, b = cluster.start("a", "b", script="trains.py", **environ)
    cluster.publish(1, "a", "b")
    first = cluster.await_world(1, "a", "b")
    wait_for(lambda: a.status.get("checkpoints"), "a first commit")
    hold = cluster.shared / "hold-saves"
    hold.touch()
    wait_for((cluster.shared / "held").exists, "a save")

    cluster.start("c", script="trains.py", **environ)
    previous = [{"generation": 1, "publication": "p1", "members": ["uid-a", "uid-b"]}]
    active = {"generation": 1, "attempt": first[1]}
    cluster.publish(2, "a", "b", "c", active=active, previous=previous)
    wait_for(lambda: "waits to join" in cluster.pods["c"].status.get("message", ""), "the newcomer")
    offered = time.monotonic()  # a joining worker that is not admitted proposes a world itself after 10 s
    wait_for(lambda: time.monotonic() > offered + 12, "time in which it could be taken in")
    assert a.status["world"]["generation"] == 1

    hold.unlink()
    second = cluster.await_world(2, "a", "b", "c")
    wait_for(lambda: second in claims(cluster), "three train")
    assert claims(cluster)[second] >= a.status["checkpoints"]["shared"]["step"]
    assert (a.status["incidents"], b.status["incidents"]) == ([], []), cluster.tail()


@pytest.mark.thorough
def test_growth_keeps_the_store_of_ranks_until_they_stop(cluster: Any, wait_for: Wait) -> None:
    """Their checkpoints use the store. Without it, ranks would wait for the last checkpoint until the deadline."""
    cluster.settings["checkpoint"]["interval"] = "1"
    checkpoints = str(cluster.shared / "checkpoints")
    a, b = cluster.start("a", "b", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints)
    cluster.publish(1, "a", "b")
    first = cluster.await_world(1, "a", "b")
    wait_for(lambda: a.status.get("checkpoints"), "a first commit")
    (c,) = cluster.start("c", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints)
    previous = [{"generation": 1, "publication": "p1", "members": ["uid-a", "uid-b"]}]
    active = {"generation": 1, "attempt": first[1]}
    cluster.publish(2, "a", "b", "c", active=active, previous=previous)
    third = cluster.await_world(2, "a", "b", "c")
    wait_for(lambda: third in claims(cluster) and c.step > claims(cluster)[third], "three train")
    assert a.status["incidents"] == b.status["incidents"] == [], cluster.tail()
    assert f"step {claims(cluster)[third]} is durable" in a.log.read_text(), cluster.tail()


def test_a_killed_rank_comes_back_from_a_warm_process(cluster: Any, wait_for: Wait) -> None:
    cluster.settings["budgets"] = []
    checkpoints = str(cluster.shared / "checkpoints")
    copies = f"file://{cluster.shared}/object"
    (a,) = cluster.start(
        "a", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints, HOLDFAST_OBJECT_URL=copies, WARM="1"
    )
    cluster.publish(1, "a")
    first = cluster.await_world(1, "a")
    wait_for(lambda: "a warm standby process is ready" in a.log.read_text(), "a process stands by")
    wait_for(lambda: a.status.get("checkpoints"), "a first commit")
    (rank,) = a.ranks
    os.kill(rank["pid"], signal.SIGKILL)
    cluster.await_world(1, "a", above=first)
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], "it goes on")
    assert "a warm process starts as a rank" in a.log.read_text(), cluster.tail()
    a.process.terminate()
    assert a.wait() == 75, cluster.tail()
    last, copied = a.status["checkpoints"]["shared"], a.status["checkpoints"]["object"]
    assert {**copied, "time": ""} == {**last, "time": ""}, "copied when the ranks were gone already"
    name = f"step-{last['step']}.g{last['generation']}.a{last['attempt']}"
    assert (cluster.shared / "object" / name / "MANIFEST.json").exists()
    assert (cluster.shared / "object" / "claims" / "1.1.json").exists()


def kills(folder: Path, *, step: int, at: Activity) -> dict[str, str]:
    """Kill rank 1 at this activity of this step, after a pause in which the other ranks reach it too."""
    folder.mkdir()
    waits = Fault(number=1, kind=Kind.SLEEP, rank=1, step=step, at=at, seconds=0.3)
    ends = Fault(number=2, kind=Kind.KILL, rank=1, step=step, at=at)
    (folder / PLAN_FILE).write_text(json.dumps([waits.to_json(), ends.to_json()]))
    return {"HOLDFAST_CHAOS": str(folder)}


@pytest.mark.thorough
def test_step_applied_by_a_survivor_is_not_reported_as_lost(cluster: Any, wait_for: Wait) -> None:
    """The survivor applied a prepared step, and a rank that joins is slow to load that step."""
    cluster.settings["processesPerWorker"] = 2
    doubt = kills(cluster.shared / "chaos", step=9, at=Activity.VOTE)
    (a,) = cluster.start("a", script="trains.py", LOADS_SLOWLY="0.3", **doubt)
    cluster.publish(1, "a")
    wait_for(lambda: [i["resumedTime"] is not None for i in a.status.get("incidents", ())] == [True], cluster.tail)
    (incident,) = a.status["incidents"]
    told = (incident["reason"], incident["lostSteps"], incident["restoredFrom"])
    assert told == ("RankKilled", 0, "survivor"), cluster.tail()
    wait_for(lambda: "step 9, in doubt on 0, is applied" in a.log.read_text(), cluster.tail)
    wait_for(lambda: a.step > 10, cluster.tail)
    assert a.status["accounting"]["lostSteps"] == 0
    kinds = [json.loads(line)["kind"] for line in (a.run_dir / TIMELINE_FILE).read_text().splitlines()]
    assert [kinds.count(kind) for kind in ("failure", "recovery", "restore")] == [1, 1, 0]


def test_rank_asleep_in_its_loss_is_replaced_without_loss(cluster: Any, wait_for: Wait) -> None:
    cluster.find_hangs()
    cluster.settings["processesPerWorker"] = 2
    (a,) = cluster.start("a", script="trains.py", ASLEEP="1")
    cluster.publish(1, "a")
    wait_for(lambda: len(a.ranks) == 2 and a.step > 0, cluster.tail)
    before = {rank["rank"]: rank["pid"] for rank in a.ranks}
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], cluster.tail)
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["reason"], incident["rank"]) == ("Infrastructure", "Hung", 1)
    assert "in compute after step 60" in incident["message"]
    assert incident["message"].endswith("; waiting: rank 0 for its gradients")
    assert incident["lostSteps"] == 0
    after = {rank["rank"]: rank["pid"] for rank in a.ranks}
    assert after[0] == before[0]
    assert after[1] != before[1]
    (stacks,) = (a.run_dir / "stacks").iterdir()
    assert "trains.py" in stacks.read_text()


@pytest.mark.thorough
def test_hang_of_one_rank_keeps_the_stacks_of_all_ranks(cluster: Any, wait_for: Wait) -> None:
    cluster.find_hangs()
    pods = cluster.start("a", "b", "c", script="trains.py", ASLEEP="1")
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: all(pod.ranks and pod.step > 0 for pod in pods), cluster.tail)
    before = [pod.ranks[0]["pid"] for pod in pods]
    a = pods[0]
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], cluster.tail)
    (incident,) = a.status["incidents"]
    assert (incident["reason"], incident["rank"], incident["lostSteps"]) == ("Hung", 1, 0)
    wait_for(lambda: all(pod.world == a.world and pod.step > 60 for pod in pods), cluster.tail)
    for number, pod in enumerate(pods):
        (stacks,) = (pod.run_dir / "stacks").iterdir()
        message, _, story = stacks.read_text().partition("\n")
        assert message == incident["message"]
        assert f"== rank {number}" in story
        assert ("in hurt" if number == 1 else "gradient_reducer.py") in story
    after = [pod.ranks[0]["pid"] for pod in pods]
    assert [pid == before[number] for number, pid in enumerate(after)] == [True, False, True]


@pytest.mark.thorough
def test_deadlocked_ranks_of_three_launchers_leave_and_survive(cluster: Any, wait_for: Wait) -> None:
    """The ranks leave their attempt, and none of them is killed."""
    cluster.find_hangs()
    pods = cluster.start("a", "b", "c", script="trains.py", MISMATCH="1")
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: all(pod.ranks and pod.step > 0 for pod in pods), cluster.tail)
    before = [pod.ranks[0]["pid"] for pod in pods]
    a, b, _ = pods
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], cluster.tail)
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["reason"], incident["rank"]) == ("Infrastructure", "Hung", 1)
    assert "in vote after step 60" in incident["message"]
    assert incident["message"].endswith("; waiting: ranks 0, 2 for its gradients: each waits for the other")
    assert (incident["action"], incident["lostSteps"]) == ("InPlace", 0)
    wait_for(lambda: all(pod.world == a.world and pod.step > 60 for pod in pods), cluster.tail)
    assert [pod.ranks[0]["pid"] for pod in pods] == before
    for pod in pods:
        (stacks,) = (pod.run_dir / "stacks").iterdir()
        assert "rank 1 has waited for " in stacks.read_text()
        assert "trains.py" in stacks.read_text()
    assert "receive_" in next((b.run_dir / "stacks").iterdir()).read_text()


@pytest.mark.thorough
def test_rank_computing_after_its_attempt_ended_is_ended(cluster: Any, wait_for: Wait) -> None:
    """The other ranks continue."""
    cluster.find_hangs()
    cluster.settings["processesPerWorker"] = 3
    (a,) = cluster.start("a", script="trains.py", STRAYS="1")
    cluster.publish(1, "a")
    wait_for(lambda: len(a.ranks) == 3 and a.step > 0, cluster.tail)
    before = {rank["rank"]: rank["pid"] for rank in a.ranks}
    wait_for(
        lambda: a.step > 60 and len(a.status["incidents"]) > 1 and a.status["incidents"][1]["resumedTime"],
        cluster.tail,
    )
    killed, hung = a.status["incidents"]
    assert (killed["reason"], killed["rank"]) == ("RankKilled", 0)
    assert (hung["cause"], hung["reason"], hung["rank"]) == ("Infrastructure", "Hung", 1)
    assert hung["message"].startswith("rank 1 left its attempt and has been busy for ")
    assert "in compute after step 60" in hung["message"]
    after = {rank["rank"]: rank["pid"] for rank in a.ranks}
    assert after[2] == before[2]
    assert not {after[0], after[1]} & set(before.values())


@pytest.mark.thorough
def test_if_every_rank_raises_the_last_step_is_saved_first(cluster: Any, wait_for: Wait) -> None:
    cluster.settings["checkpoint"] = {**cluster.settings["checkpoint"], "interval": "1000000"}
    checkpoints = cluster.shared / "checkpoints"
    (a,) = cluster.start("a", script="trains.py", RAISES="1", HOLDFAST_CHECKPOINT_DIR=str(checkpoints))
    cluster.publish(1, "a")
    wait_for(lambda: a.status.get("incidents") and a.status["incidents"][0]["resumedTime"], cluster.tail)
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["reason"]) == ("Application", "Exception"), cluster.tail()
    assert (incident["lostSteps"], incident["restoredFrom"]) == (0, "shared"), cluster.tail()
    assert [path.name for path in checkpoints.glob("step-*")] == ["step-60.g1.a1"]


@pytest.mark.thorough
def test_catching_an_error_of_job_step_blocks_nobody(cluster: Any, wait_for: Wait) -> None:
    """The part of that rank in the averages of the step never arrives."""
    cluster.settings["processesPerWorker"] = 2
    (a,) = cluster.start("a", script="trains.py", SWALLOWS="1")
    cluster.publish(1, "a")
    wait_for(lambda: len(a.ranks) == 2 and a.step > 0, cluster.tail)
    before = {rank["rank"]: rank["pid"] for rank in a.ranks}
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], cluster.tail)
    (incident,) = a.status["incidents"]
    told = (incident["cause"], incident["reason"], incident["rank"], incident["lostSteps"])
    assert told == ("Application", "Exception", 1, 0), cluster.tail()
    assert "pass the mean over the micro-batch, loss.mean()" in incident["message"]
    wait_for(lambda: a.step > 60 and len(a.ranks) == 2, cluster.tail)
    after = {rank["rank"]: rank["pid"] for rank in a.ranks}
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.thorough
def test_drained_worker_saves_first_and_the_others_continue(cluster: Any, wait_for: Wait) -> None:
    checkpoints = str(cluster.shared / "checkpoints")
    cluster.settings["minReplicas"] = 1
    a, b, c = cluster.start("a", "b", "c", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints)
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: min(pod.step for pod in (a, b, c)) > 5, "they train")
    notice = {"version": 1, "id": "spot-1", "reason": "spot terminate", "source": "AWS", "drain": True}
    (c.run_dir / "wish").write_text(json.dumps(notice))
    (c.run_dir / "wish").rename(c.run_dir / "emergency_checkpoint")
    assert c.wait() == 75, cluster.tail()
    answer = json.loads((c.run_dir / "emergency_checkpoint.ack").read_text())
    assert (answer["id"], answer["result"]) == ("spot-1", "Committed"), cluster.tail()
    cluster.await_world(1, "a", "b", above=(1, 1))
    wait_for(lambda: min(a.step, b.step) > answer["step"], "two go on")
    assert list(claims(cluster)) == [(1, 1)], "within a generation an attempt goes on under the first one's claim"
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], "the incident is over")
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["lostSteps"]) == ("Interruption", 0)
    assert incident["restoredFrom"] == "survivor"


def test_launcher_owned_memory_outlives_all_rank_processes(cluster: Any, wait_for: Wait) -> None:
    cluster.settings["budgets"] = []
    cluster.settings["checkpoint"] = {**cluster.settings["checkpoint"], "interval": "1000000"}
    memory = cluster.shared / "memory"
    environ = {
        "HOLDFAST_CHECKPOINT_DIR": str(cluster.shared / "checkpoints"),
        "HOLDFAST_MEMORY_TIER": str(memory),
        "HOLDFAST_OBJECT_URL": f"file://{cluster.shared / 'copies'}",
    }
    (a,) = cluster.start("a", script="trains.py", **environ)
    cluster.publish(1, "a")
    first = cluster.await_world(1, "a")
    wait_for(lambda: a.status.get("checkpoints", {}).get("memory"), "a first commit in memory")
    wait_for(lambda: a.step > 20, "some steps")
    os.kill(a.ranks[0]["pid"], signal.SIGKILL)
    cluster.await_world(1, "a", above=first)
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], cluster.tail)
    assert list((cluster.shared / "checkpoints").glob("step-*")) == [], "all that is kept is in memory"
    assert a.status["incidents"][0]["lostSteps"] <= 1, f"only one that was not in memory yet: {cluster.tail()}"
    assert a.status["incidents"][0]["restoredFrom"] == "memory", cluster.tail()
    wait_for(lambda: f"was read from memory:{memory}" in a.log.read_text(), cluster.tail)
    assert a.status["uploads"] == {"commits": 0, "bytes": 0, "seconds": 0.0, "failures": {}}
    a.process.terminate()
    assert a.wait() == 75, cluster.tail()


def test_node_disk_restores_its_newest_step_after_a_kill(cluster: Any, wait_for: Wait) -> None:
    """A container is killed and started again in its pod. Only its volumes are left."""
    cluster.settings["budgets"] = []
    cluster.settings["checkpoint"] = {**cluster.settings["checkpoint"], "interval": "1000000"}
    cluster.settings["processesPerWorker"] = 2
    checkpoints, disk = cluster.shared / "checkpoints", cluster.shared / "disk"
    environ = {
        "HOLDFAST_CHECKPOINT_DIR": str(checkpoints),
        "HOLDFAST_LOCAL_TIER": f"{disk}:1Gi",
        "HOLDFAST_LOCAL_INTERVAL": "5",
    }
    (a,) = cluster.start("a", script="shards.py", **environ)
    cluster.publish(1, "a")
    first = cluster.await_world(1, "a")
    wait_for(lambda: a.status.get("checkpoints", {}).get("local", {}).get("step", 0) >= 10, cluster.tail)
    ranks = [rank["pid"] for rank in a.ranks]
    a.process.kill()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    a.process.wait()
    wait_for(lambda: all(map(gone, ranks)), "no rank writes any more")
    kept = [{name.step for name in list_commits(own)} for own in disk.glob("launcher-*/*-own-*")]
    newest = max(kept[0] & kept[1])  # of one more step, a rank may have published its part alone
    assert not list(checkpoints.glob("step-*")), "nothing is on the volume"
    a.restart()
    second = cluster.await_world(1, "a", above=first)
    wait_for(lambda: len(digests(cluster, "found", newest, second)) == 2, cluster.tail)
    made, found = digests(cluster, "applied", newest), digests(cluster, "found", newest, second)
    assert found == made, "each shard is as it was when that step was made"
    wait_for(lambda: a.status.get("restored") == {"step": newest, "from": "local"}, cluster.tail)


def digests(cluster: Any, kind: str, step: int, attempt_id: tuple[int, int] | None = None) -> dict[int, str]:
    """Return the reported state digests of a step by shard."""
    lines = [line for file in cluster.shared.glob("states-*") for line in file.read_text().split("\n")[:-1]]
    told = [json.loads(line) for line in lines]
    here = (one for one in told if (one["kind"], one["step"]) == (kind, step))
    return {one["shard"]: one["digest"] for one in here if attempt_id in (None, tuple(one["pair"]))}


def test_a_local_tier_that_cannot_be_written_is_refused_by_name(cluster: Any) -> None:
    (a,) = cluster.launch("a", script="trains.py", HOLDFAST_LOCAL_TIER="/proc/holdfast")
    assert a.wait() == 2, cluster.tail()
    assert "checkpoint.local, or --local-tier PATH" in a.log.read_text()


def test_too_small_local_tier_ends_the_script_with_the_need(cluster: Any, wait_for: Wait) -> None:
    """The message names the field."""
    cluster.settings["checkpoint"] = {**cluster.settings["checkpoint"], "interval": "1000000"}
    disk = cluster.shared / "disk"
    (a,) = cluster.start(
        "a",
        script="trains.py",
        HOLDFAST_CHECKPOINT_DIR=str(cluster.shared / "checkpoints"),
        HOLDFAST_LOCAL_TIER=f"{disk}:64Ki",
        HOLDFAST_LOCAL_INTERVAL="5",
    )
    cluster.publish(1, "a")
    wait_for(
        lambda: "raise checkpoint.local.sizeLimit (or --local-tier PATH:SIZE)" in a.log.read_text(), cluster.tail
    )
    wait_for(lambda: "NoCapacityError" in a.log.read_text(), cluster.tail)
    assert not list(disk.glob("launcher-*/*/step-*"))
