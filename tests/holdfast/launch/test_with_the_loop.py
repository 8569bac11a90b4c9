"""The launcher and the training loop together, on a shared checkpoint folder."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

Wait = Callable[..., Any]


def claims(cluster: Any) -> dict[tuple[int, int], int]:
    """From which step each attempt went on."""
    files = sorted((cluster.shared / "checkpoints" / "claims").glob("*.json"))
    found = [json.loads(file.read_text()) for file in files]
    return {(claim["generation"], claim["attempt"]): claim["fromStep"] for claim in found}


def test_three_shrink_to_two_and_grow_to_three_without_losing_a_step(cluster: Any, wait_for: Wait) -> None:
    checkpoints = str(cluster.shared / "checkpoints")
    a, b, c = cluster.start("a", "b", "c", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints)
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: a.status.get("checkpoints"), "a first commit", deadline=90)
    c.process.kill()
    second = cluster.await_world(1, "a", "b", above=(1, 1))
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], "two go on", deadline=90)
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["action"]) == ("Infrastructure", "Shrink"), cluster.tail()
    assert incident["lostSteps"] is not None, str(incident) + cluster.tail()

    cluster.start("d", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints)
    previous = [{"generation": 1, "publication": "p1", "members": ["uid-a", "uid-b", "uid-c"]}]
    active = {"generation": 1, "attempt": second[1]}
    known = [json.loads(file.read_text()) for file in (cluster.shared / "checkpoints" / "claims").glob("*.json")]
    cluster.publish(2, "a", "b", "d", active=active, previous=previous, gone=["uid-c"], claims=known)
    third = cluster.await_world(2, "a", "b", "d")
    reached = max(a.step, b.step)
    wait_for(lambda: cluster.pods["d"].step > reached, "three train", deadline=90)
    assert claims(cluster)[third] == reached, "growth goes on from the very step at which the two stopped"
    assert len(a.status["incidents"]) == 1


def test_a_killed_rank_comes_back_from_a_warm_process(cluster: Any, wait_for: Wait) -> None:
    cluster.settings["budgets"] = []
    checkpoints = str(cluster.shared / "checkpoints")
    copies = f"file://{cluster.shared}/object"
    (a,) = cluster.start(
        "a", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints, HOLDFAST_OBJECT_URL=copies, WARM="1"
    )
    cluster.publish(1, "a")
    first = cluster.await_world(1, "a")
    wait_for(lambda: "a warm process stands by" in a.log.read_text(), "a process stands by", deadline=90)
    wait_for(lambda: a.status.get("checkpoints"), "a first commit", deadline=90)
    (rank,) = a.ranks
    os.kill(rank["pid"], signal.SIGKILL)
    cluster.await_world(1, "a", above=first)
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], "it goes on", deadline=90)
    assert "a warm process starts as a rank" in a.log.read_text(), cluster.tail()
    a.process.terminate()
    assert a.wait() == 75, cluster.tail()
    last, copied = a.status["checkpoints"]["shared"], a.status["checkpoints"]["object"]
    assert {**copied, "time": ""} == {**last, "time": ""}, "copied when the ranks were gone already"
    name = f"step-{last['step']}.g{last['generation']}.a{last['attempt']}"
    assert (cluster.shared / "object" / name / "MANIFEST.json").exists()
    assert (cluster.shared / "object" / "claims" / "1.1.json").exists()


def test_a_rank_asleep_in_its_loss_is_replaced_and_no_step_is_lost(cluster: Any, wait_for: Wait) -> None:
    cluster.settings["processesPerWorker"] = 2
    (a,) = cluster.start("a", script="trains.py", ASLEEP="1")
    cluster.publish(1, "a")
    wait_for(lambda: len(a.ranks) == 2 and a.step > 0, cluster.tail, deadline=90)
    before = {rank["rank"]: rank["pid"] for rank in a.ranks}
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], cluster.tail, deadline=90)
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


def test_ranks_of_three_launchers_that_wait_for_each_other_leave_their_attempt_and_none_is_killed(
    cluster: Any, wait_for: Wait
) -> None:
    pods = cluster.start("a", "b", "c", script="trains.py", MISMATCH="1")
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: all(pod.ranks and pod.step > 0 for pod in pods), cluster.tail, deadline=90)
    before = [pod.ranks[0]["pid"] for pod in pods]
    a, b, _ = pods
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], cluster.tail, deadline=90)
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


def test_a_rank_that_computes_on_when_its_attempt_is_over_is_ended_and_the_others_go_on(
    cluster: Any, wait_for: Wait
) -> None:
    cluster.settings["processesPerWorker"] = 3
    (a,) = cluster.start("a", script="trains.py", STRAYS="1")
    cluster.publish(1, "a")
    wait_for(lambda: len(a.ranks) == 3 and a.step > 0, cluster.tail, deadline=90)
    before = {rank["rank"]: rank["pid"] for rank in a.ranks}
    wait_for(
        lambda: a.step > 60 and len(a.status["incidents"]) > 1 and a.status["incidents"][1]["resumedTime"],
        cluster.tail,
        deadline=120,
    )
    killed, hung = a.status["incidents"]
    assert (killed["reason"], killed["rank"]) == ("RankKilled", 0)
    assert (hung["cause"], hung["reason"], hung["rank"]) == ("Infrastructure", "Hung", 1)
    assert hung["message"].startswith("rank 1 left its attempt and has been busy for ")
    assert "in compute after step 60" in hung["message"]
    after = {rank["rank"]: rank["pid"] for rank in a.ranks}
    assert after[2] == before[2]
    assert not {after[0], after[1]} & set(before.values())


def test_a_drained_worker_commits_first_and_the_others_go_on_from_there(cluster: Any, wait_for: Wait) -> None:
    checkpoints = str(cluster.shared / "checkpoints")
    cluster.settings["minReplicas"] = 1
    a, b, c = cluster.start("a", "b", "c", script="trains.py", HOLDFAST_CHECKPOINT_DIR=checkpoints)
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: min(pod.step for pod in (a, b, c)) > 5, "they train", deadline=90)
    notice = {"version": 1, "id": "spot-1", "reason": "spot terminate", "source": "AWS", "drain": True}
    (c.run_dir / "wish").write_text(json.dumps(notice))
    (c.run_dir / "wish").rename(c.run_dir / "emergency_checkpoint")
    assert c.wait() == 75, cluster.tail()
    answer = json.loads((c.run_dir / "emergency_checkpoint.ack").read_text())
    assert (answer["id"], answer["result"]) == ("spot-1", "Committed"), cluster.tail()
    cluster.await_world(1, "a", "b", above=(1, 1))
    wait_for(lambda: min(a.step, b.step) > answer["step"], "two go on", deadline=90)
    assert list(claims(cluster)) == [(1, 1)], "within a generation an attempt goes on under the first one's claim"
    wait_for(lambda: a.status["incidents"][0]["resumedTime"], "the incident is over", deadline=90)
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["lostSteps"]) == ("Interruption", 0)
