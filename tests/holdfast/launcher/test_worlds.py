"""Launchers form worlds, lose members and admit them again: real processes on the loopback interface."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

Wait = Callable[..., Any]


def is_over(pod: Any) -> bool:
    """Return whether the first incident of the pod is over."""
    incidents = pod.status["incidents"]
    return bool(incidents and incidents[0]["resumedTime"])


@pytest.mark.thorough
def test_three_launchers_run_a_torchrun_script_to_its_end(cluster: Any) -> None:
    pods = cluster.start("a", "b", "c", script="reduces.py")
    cluster.publish(1, "a", "b", "c")
    assert [pod.wait() for pod in pods] == [0, 0, 0], cluster.tail()
    assert [(cluster.shared / f"sum-{rank}").read_text() for rank in range(3)] == ["6 of 3"] * 3
    assert {pod.status["phase"] for pod in pods} == {"Complete"}
    assert {pod.status["exit"]["reason"] for pod in pods} == {"Complete"}


def test_a_rank_finds_what_torchrun_would_set(cluster: Any, wait_for: Wait) -> None:
    cluster.settings["processesPerWorker"] = 2
    pods = cluster.start("a", "b", script="waits.py")
    cluster.publish(1, "a", "b")
    files = [cluster.shared / f"env-{rank}-0.json" for rank in range(4)]
    wait_for(lambda: all(file.exists() for file in files), "four ranks run")
    found = [json.loads(file.read_text()) for file in files]
    assert [environ["LOCAL_RANK"] for environ in found] == ["0", "1", "0", "1"]
    assert [environ["GROUP_RANK"] for environ in found] == ["0", "0", "1", "1"]
    assert {environ["WORLD_SIZE"] for environ in found} == {"4"}
    assert {environ["LOCAL_WORLD_SIZE"] for environ in found} == {"2"}
    assert {environ["MASTER_ADDR"] for environ in found} == {"127.0.0.1"}
    assert len({environ["MASTER_PORT"] for environ in found}) == 1
    assert {environ["TORCHELASTIC_USE_AGENT_STORE"] for environ in found} == {"True"}
    assert {environ["OMP_NUM_THREADS"] for environ in found} == {"1"}
    assert {environ["GLIBC_TUNABLES"] for environ in found} == {"glibc.cpu.x86_non_temporal_threshold=0x400000"}
    assert {environ["HOLDFAST_PUBLICATION"] for environ in found} == {"p1"}
    (cluster.shared / "finish").touch()
    assert [pod.wait() for pod in pods] == [0, 0]


def test_killed_rank_is_one_incident_and_a_new_attempt(cluster: Any, wait_for: Wait) -> None:
    """The cause of the incident is Infrastructure."""
    pods = cluster.start("a", "b", "c")
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: all(pod.step > 60 for pod in pods), "all train")
    os.kill(pods[1].ranks[0]["pid"], signal.SIGKILL)
    second = cluster.await_world(1, "a", "b", "c", above=(1, 1))
    wait_for(lambda: all(is_over(pod) for pod in pods), "the incident is over")
    for pod in pods:
        (incident,) = pod.status["incidents"]
        assert (incident["generation"], incident["attempt"]) == (1, 1)
        assert (incident["cause"], incident["reason"], incident["pod"]) == ("Infrastructure", "RankKilled", "b")
        assert incident["lostSteps"] is not None
    cluster.publish(1, "a", "b", "c", acknowledged=[{"generation": 1, "attempt": 1}])
    wait_for(lambda: not any(pod.status["incidents"] for pod in pods), "the incident is acknowledged")
    assert {pod.world for pod in pods} == {second}


def test_two_continue_without_a_killed_launcher(cluster: Any, wait_for: Wait) -> None:
    """The replacement of the launcher joins the two."""
    a, b, c = cluster.start("a", "b", "c")
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: min(a.step, b.step) > 5, "they train")
    c.process.kill()
    second = cluster.await_world(1, "a", "b", above=(1, 1))
    lost = wait_for(lambda: a.status["lostMembers"], "it is told who is lost")
    assert lost[0]["podUID"] == "uid-c"
    before = a.step
    wait_for(lambda: min(a.step, b.step) > before, "two go on")

    cluster.start("d")
    previous = [{"generation": 1, "publication": "p1", "members": ["uid-a", "uid-b", "uid-c"]}]
    active = {"generation": 1, "attempt": second[1]}
    cluster.publish(2, "a", "b", "d", active=active, previous=previous, gone=["uid-c"])
    cluster.await_world(2, "a", "b", "d")
    wait_for(lambda: cluster.pods["d"].step > 0, "three train")
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["action"]) == ("Infrastructure", "Shrink")


def test_the_coordinator_is_replaced_by_the_next_index(cluster: Any, wait_for: Wait) -> None:
    a, b, c = cluster.start("a", "b", "c")
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: min(b.step, c.step) > 5, "they train")
    a.process.kill()
    cluster.await_world(1, "b", "c", above=(1, 1))
    assert b.status["world"]["coordinator"] == "uid-b"


def test_a_stopped_launcher_is_silent_and_left_behind(cluster: Any, wait_for: Wait) -> None:
    a, b, c = cluster.start("a", "b", "c")
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: min(a.step, b.step) > 5, "they train")
    c.process.send_signal(signal.SIGSTOP)
    second = cluster.await_world(1, "a", "b", above=(1, 1))
    lost = wait_for(lambda: a.status["lostMembers"], "it is told who is lost")
    assert lost[0]["how"] == "Silent"
    c.process.send_signal(signal.SIGCONT)
    cluster.await_world(1, "a", "b", "c", above=second)


def test_another_jobs_key_is_refused(cluster: Any, wait_for: Wait) -> None:
    a, b, c = cluster.start("a", "b", "c")
    document = cluster.document(1, "a", "b", "c")
    c.publish(document | {"jobKey": "cd" * 32})  # never the other's: it would be let in with that
    for pod in (a, b):
        pod.publish(document)
    wait_for(lambda: "does not have this job's key" in a.log.read_text() + c.log.read_text(), "c is refused")
    assert c.world is None
    assert "uid-c" not in str(a.status["world"])
