"""A rank that is asked to leave keeps its process and its state, and gets a place in the next world."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

Wait = Callable[..., Any]
SCRIPTS = Path(__file__).parents[1] / "scripts"


def story(cluster: Any, slot: int, folder: str = ".") -> list[dict[str, Any]]:
    """Return what the process of a slot sent and received."""
    file = cluster.shared / folder / f"said-{slot}"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last line may be half written


def said(cluster: Any, slot: int, kind: str, folder: str = ".") -> list[dict[str, Any]]:
    return [line for line in story(cluster, slot, folder) if line["type"] == kind]


def training(cluster: Any, wait_for: Wait, processes: int = 2, **environ: str) -> Any:
    """One launcher whose ranks are training."""
    cluster.settings["processesPerWorker"] = processes
    (pod,) = cluster.start("a", script="keeps.py", **environ)
    cluster.publish(1, "a")
    wait_for(lambda: pod.step > 3 and len(pod.ranks) == processes, lambda: f"it trains {cluster.tail()}")
    return pod


def in_world(pod: Any, attempt: int) -> Callable[[], bool]:
    """Return whether that attempt has completed a step."""
    return lambda: (
        pod.world == (1, attempt)
        and bool([i for i in pod.status["incidents"] if i["attempt"] == attempt - 1 and i["resumedTime"]])
    )


def test_survivor_keeps_its_process_and_the_dead_is_replaced(cluster: Any, wait_for: Wait) -> None:
    pod = training(cluster, wait_for)
    before = {rank["localRank"]: rank["pid"] for rank in pod.ranks}
    os.kill(before[0], signal.SIGKILL)
    wait_for(in_world(pod, 2), lambda: f"the next attempt {cluster.tail()}")
    after = {rank["localRank"]: rank["pid"] for rank in pod.ranks}
    assert after[1] == before[1]
    assert after[0] != before[0]
    (world,) = [line["what"] for line in said(cluster, 1, "heard") if line["what"]["type"] == "world"]
    assert (world["attempt"], world["rank"], world["torchrun"]["LOCAL_RANK"]) == (2, 1, "1")
    (incident,) = pod.status["incidents"]
    assert (incident["cause"], incident["reason"]) == ("Infrastructure", "RankKilled")


def test_a_rank_that_does_not_leave_is_killed_and_replaced(cluster: Any, wait_for: Wait) -> None:
    pod = training(cluster, wait_for, STUBBORN="1")
    before = {rank["localRank"]: rank["pid"] for rank in pod.ranks}
    os.kill(before[0], signal.SIGKILL)
    wait_for(in_world(pod, 2), lambda: f"the next attempt {cluster.tail()}")
    after = {rank["localRank"]: rank["pid"] for rank in pod.ranks}
    assert not set(after.values()) & set(before.values())
    assert len(pod.status["incidents"]) == 1


def test_a_rank_that_cannot_go_on_is_replaced(cluster: Any, wait_for: Wait) -> None:
    pod = training(cluster, wait_for, TORN="1")
    before = {rank["localRank"]: rank["pid"] for rank in pod.ranks}
    os.kill(before[0], signal.SIGKILL)
    wait_for(in_world(pod, 2), lambda: f"the next attempt {cluster.tail()}")
    assert not {rank["pid"] for rank in pod.ranks} & set(before.values())
    assert len(pod.status["incidents"]) == 1


def test_sleeping_rank_is_found_and_ended_without_losing_steps(cluster: Any, wait_for: Wait) -> None:
    cluster.find_hangs()
    pod = training(cluster, wait_for, ASLEEP="1")
    before = {rank["localRank"]: rank["pid"] for rank in pod.ranks}
    wait_for(in_world(pod, 2), lambda: f"the next attempt {cluster.tail()}")
    after = {rank["localRank"]: rank["pid"] for rank in pod.ranks}
    assert after[0] == before[0]
    assert after[1] != before[1]
    (incident,) = pod.status["incidents"]
    assert (incident["cause"], incident["reason"], incident["rank"]) == ("Infrastructure", "Hung", 1)
    assert incident["message"].startswith("rank 1 has been busy for ")
    (stacks,) = (pod.run_dir / "stacks").iterdir()
    assert "keeps.py" in stacks.read_text()
    wait_for(lambda: not (pod.run_dir / "board" / "1").exists(), "its board is gone with it")


def test_slow_interpreter_exit_is_judged_by_its_exit_code(cluster: Any, wait_for: Wait) -> None:
    """The rank has closed its connection. Others wait for it meanwhile, and it does not count as hung."""
    cluster.find_hangs()
    pod = training(cluster, wait_for, ENDS="1")
    wait_for(in_world(pod, 2), lambda: f"the next attempt {cluster.tail()}")
    (incident,) = pod.status["incidents"]
    assert (incident["cause"], incident["reason"], incident["exitCode"]) == ("Application", "ExitCode", 2)


def test_who_dies_while_it_waits_is_only_replaced(cluster: Any, wait_for: Wait) -> None:
    cluster.settings["backoff"] = {"initialSeconds": 5.0, "maxSeconds": 5.0}
    pod = training(cluster, wait_for, processes=3, DIES="0")
    pids = {rank["localRank"]: rank["pid"] for rank in pod.ranks}
    os.kill(pids[2], signal.SIGABRT)  # an error of the script: a pause before the next attempt
    wait_for(in_world(pod, 2), lambda: f"the next attempt {cluster.tail()}")
    after = {rank["localRank"]: rank["pid"] for rank in pod.ranks}
    assert after[1] == pids[1]
    assert said(cluster, 0, "left")[-1]["pid"] == pids[0] != after[0]
    assert len(pod.status["incidents"]) == 1


def test_the_launcher_leaves_no_process_behind(cluster: Any, wait_for: Wait) -> None:
    pod = training(cluster, wait_for)
    pids = [rank["pid"] for rank in pod.ranks]
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 75
    for pid in pids:
        wait_for(lambda pid=pid: not _runs(pid), f"{pid} is gone")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_growth_stops_the_others_without_ending_them(cluster: Any, wait_for: Wait) -> None:
    (a,) = cluster.start("a", script="keeps.py")
    cluster.publish(1, "a")
    wait_for(lambda: a.step > 3, "one trains")
    pids = [rank["pid"] for rank in a.ranks]
    cluster.start("b", script="keeps.py")
    cluster.publish(2, "a", "b", previous=[{"generation": 1, "publication": "p1", "members": ["uid-a"]}])
    cluster.await_world(2, "a", "b")
    reached = a.step
    wait_for(lambda: a.step > reached + 3, "both train")
    assert [rank["pid"] for rank in a.ranks] == pids
    (wish,) = [line["what"] for line in said(cluster, 0, "heard") if line["what"]["type"] == "quiesce"]
    assert wish["commit"] is False
    assert a.status["incidents"] == []


def standing_by(cluster: Any, wait_for: Wait) -> tuple[Any, Any]:
    """One launcher trains. The other is no member yet, and starts its script nevertheless."""
    (cluster.shared / "b").mkdir()
    (a,) = cluster.start("a", script="stands.py")
    (b,) = cluster.start("b", script="stands.py", TEST_DIR=str(cluster.shared / "b"))
    cluster.publish(1, "a")
    wait_for(lambda: a.step > 3, lambda: f"one trains {cluster.tail()}")
    wait_for(lambda: said(cluster, 0, "ready", "b"), lambda: f"b stands by {cluster.tail()}")
    return a, b


def take_in(cluster: Any, wait_for: Wait, b: Any) -> None:
    cluster.publish(2, "a", "b", previous=[{"generation": 1, "publication": "p1", "members": ["uid-a"]}])
    cluster.await_world(2, "a", "b")
    wait_for(lambda: b.step > 3, lambda: f"both train {cluster.tail()}")


def test_a_process_that_stood_by_takes_its_place(cluster: Any, wait_for: Wait) -> None:
    a, b = standing_by(cluster, wait_for)
    (ready,) = said(cluster, 0, "ready", "b")
    assert b.ranks == []
    take_in(cluster, wait_for, b)
    assert [rank["pid"] for rank in b.ranks] == [ready["pid"]]
    assert a.status["incidents"] == []


def test_process_dying_on_standby_is_replaced_without_effect(cluster: Any, wait_for: Wait) -> None:
    a, b = standing_by(cluster, wait_for)
    (ready,) = said(cluster, 0, "ready", "b")
    os.kill(ready["pid"], signal.SIGKILL)
    wait_for(lambda: "a standby process ended" in b.log.read_text(), "its end is seen")
    take_in(cluster, wait_for, b)
    assert [rank["pid"] for rank in b.ranks] != [ready["pid"]]
    assert a.status["incidents"] == b.status["incidents"] == []


def test_a_script_that_needs_its_place_from_the_start_gets_it(cluster: Any, wait_for: Wait) -> None:
    """The launcher cannot detect that this script must not be on standby."""
    source = (SCRIPTS / "stands.py").read_text()
    body = "import os, time\nhere = pathlib.Path(os.environ['TEST_DIR'])\n(here / 'began').touch()\n"
    body += "while not (here / 'go').exists(): time.sleep(0.01)\n"
    body += f"os.environ['RA' + 'NK']\nrunpy.run_path({str(SCRIPTS / 'keeps.py')!r}, run_name='__main__')\n"
    script = cluster.shared / "needs.py"
    script.write_text(source[: source.index("runpy.run_path")] + body)
    (a,) = cluster.start("a", script=str(script))
    (b,) = cluster.start("b", script="keeps.py")
    cluster.publish(1, "b")
    wait_for((cluster.shared / "began").exists, lambda: f"it stands by {cluster.tail()}")
    b.stop()
    before = [{"generation": 1, "publication": "p1", "members": ["uid-b"]}]
    a.publish(cluster.document(2, "a", previous=before, gone=["uid-b"]))
    wait_for(lambda: (a.status["accepted"] or {}).get("generation") == 2, lambda: f"it joins {cluster.tail()}")
    (cluster.shared / "go").touch()
    wait_for(lambda: a.step > 3, lambda: f"it trains {cluster.tail()}")
    assert a.status["incidents"] == []
