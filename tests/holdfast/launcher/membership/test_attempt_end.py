"""How a job, an attempt or a worker ends, and what is reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Wait = Callable[..., Any]


def test_exception_is_application_until_its_budget_is_spent(cluster: Any) -> None:
    pods = cluster.start("a", "b", RAISE_AT="20")
    cluster.publish(1, "a", "b")
    assert [pod.wait() for pod in pods] == [1, 1], cluster.tail()
    for pod in pods:
        ending = pod.ending
        assert (ending["code"], ending["cause"], ending["final"]) == (1, "Application", True)
        assert "ValueError: loss is negative" in ending["message"]
        assert ending["traceback"][-1] == "ValueError: loss is negative"
        assert pod.status["phase"] == "Failed"
        assert [incident["cause"] for incident in pod.status["incidents"]] == ["Application"] * 2


def test_script_that_cannot_be_imported_ends_with_its_last_lines(cluster: Any) -> None:
    (cluster.shared / "broken.py").write_text("import no_such_module\n")
    (pod,) = cluster.start("a", script=str(cluster.shared / "broken.py"))
    cluster.publish(1, "a")
    assert pod.wait() == 1
    assert pod.ending["cause"] == "Application"
    assert pod.ending["traceback"][-1] == "ModuleNotFoundError: No module named 'no_such_module'"
    *_, before, last = pod.log.read_text().splitlines()
    assert before == pod.ending["traceback"][-1]
    assert last.startswith("holdfast: the job has failed: ")


def test_a_program_that_does_not_exist_is_named(cluster: Any) -> None:
    """The failure is not permanent, since the program may be missing on this node only."""
    (pod,) = cluster.launch("a", program="/no/such/program")
    assert pod.wait() == 2
    assert "/no/such/program" in pod.ending["message"]
    assert (pod.ending["cause"], pod.ending["final"]) == ("Application", False)


def test_what_torch_record_wrote_is_the_traceback(cluster: Any) -> None:
    cluster.settings["budgets"][0]["maxRestarts"] = 0
    error = {"message": {"message": "KeyError: 'lr'", "extraInfo": {"py_callstack": "line 1\nKeyError: 'lr'\n"}}}
    script = cluster.shared / "recorded.py"
    script.write_text(
        "import os, sys\n"
        f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({json.dumps(error)!r})\n"
        "sys.exit(3)\n"
    )
    (pod,) = cluster.start("a", script=str(script))
    cluster.publish(1, "a")
    assert pod.wait() == 3
    assert pod.ending["traceback"] == ["line 1", "KeyError: 'lr'"]


def test_a_rule_that_says_so_ends_the_job_without_another_try(cluster: Any) -> None:
    codes = {"operator": "In", "values": [3]}
    cluster.settings["rules"] = [{"name": "bug", "action": "FailJob", "exitCodes": codes}]
    cluster.settings["rulesElsewhere"] = False
    script = cluster.shared / "three.py"
    script.write_text("import sys\nsys.exit(3)\n")
    (pod,) = cluster.start("a", script=str(script))
    cluster.publish(1, "a")
    assert pod.wait() == 3
    assert pod.ending["message"].endswith("rule bug has the action FailJob")
    assert pod.ending["final"]
    (incident,) = pod.status["incidents"]
    assert (incident["action"], incident["exitCode"]) == ("FailJob", 3)


def test_a_touch_file_is_acknowledged_when_its_commit_is_durable(cluster: Any, wait_for: Wait) -> None:
    (pod,) = cluster.start("a")
    cluster.publish(1, "a")
    wait_for(lambda: pod.step > 3, "it trains")
    (pod.run_dir / "emergency_checkpoint").touch()
    ack = pod.run_dir / "emergency_checkpoint.ack"
    wait_for(ack.exists, "an acknowledgement")
    answer = json.loads(ack.read_text())
    assert (answer["version"], answer["result"], answer["tier"]) == (1, "Committed", "shared")
    assert answer["step"] >= 3
    assert not (pod.run_dir / "emergency_checkpoint").exists()
    world = pod.world
    wait_for(lambda: pod.step > answer["step"] + 3, "it goes on")
    assert pod.world == world


def test_notice_drains_after_a_checkpoint_without_lost_steps(cluster: Any, wait_for: Wait) -> None:
    a, b, c = cluster.start("a", "b", "c")
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: min(p.step for p in (a, b, c)) > 5, "they train")
    notice = {"version": 1, "id": "aws-1", "reason": "spot terminate", "source": "AWS", "drain": True}
    temporary = c.run_dir / "wish"
    temporary.write_text(json.dumps(notice))
    temporary.rename(c.run_dir / "emergency_checkpoint")
    assert c.wait() == 75
    assert json.loads((c.run_dir / "emergency_checkpoint.ack").read_text())["id"] == "aws-1"
    assert c.status["notices"][0]["id"] == "aws-1"
    cluster.await_world(1, "a", "b", above=(1, 1))
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], "two go on")
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["pod"]) == ("Interruption", "c")


def test_too_short_notice_is_logged_and_the_checkpoint_is_tried(cluster: Any, wait_for: Wait) -> None:
    """The log message states the expected seconds per tier."""
    folder, copies = str(cluster.shared / "checkpoints"), f"file://{cluster.shared}/object"
    (pod,) = cluster.start("a", SAVE_SECONDS="1000", HOLDFAST_CHECKPOINT_DIR=folder, HOLDFAST_OBJECT_URL=copies)
    cluster.publish(1, "a")
    wait_for(lambda: pod.status.get("checkpoints"), "a first commit")
    notice = {"version": 1, "id": "gcp-1", "reason": "preempted", "source": "GCP", "drain": True}
    temporary = pod.run_dir / "wish"
    temporary.write_text(json.dumps(notice))
    temporary.rename(pod.run_dir / "emergency_checkpoint")
    assert pod.wait() == 75
    log = pod.log.read_text()
    assert "the last checkpoint is saved on shared, and may be too late: " in log
    assert "(shared: done in 1000.0 s; object: not measured)" in log
    assert "only the shared tier has it" in log, "a copy that would be late is not waited for"
    assert json.loads((pod.run_dir / "emergency_checkpoint.ack").read_text())["result"] == "Committed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_sigint_drain(cluster: Any, wait_for: Wait, number: signal.Signals) -> None:
    (pod,) = cluster.start("a")
    cluster.publish(1, "a")
    wait_for(lambda: pod.step > 3, "it trains")
    pod.process.send_signal(number)
    assert pod.wait() == 75
    assert int((cluster.shared / "saved").read_text()) >= pod.step
    assert pod.ending["code"] == 75


def test_second_sigint_ends_the_launcher_and_a_script_that_ignores_sigterm(cluster: Any, wait_for: Wait) -> None:
    script = cluster.shared / "ignores.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        "folder = pathlib.Path(os.environ['TEST_DIR'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (folder / 'asked').touch())\n"
        "(folder / 'running').touch()\n"
        "while True: time.sleep(0.05)\n"
    )
    (pod,) = cluster.start("a", script=str(script))
    cluster.publish(1, "a")
    wait_for((cluster.shared / "running").exists, "it runs")
    pod.process.send_signal(signal.SIGINT)
    wait_for((cluster.shared / "asked").exists, "the script gets SIGTERM")
    begin = time.monotonic()
    pod.process.send_signal(signal.SIGINT)
    assert pod.wait() == 130
    assert time.monotonic() - begin < 15, "the grace period of such a script is 25 s"


def test_second_sigint_ends_a_checkpoint_that_takes_long(cluster: Any, wait_for: Wait) -> None:
    script = cluster.shared / "slow.py"
    source = (Path(__file__).parents[1] / "scripts" / "speaks.py").read_text()
    script.write_text(
        source.replace(
            "        save(step, [order",
            "        (saved.parent / 'saves').touch()\n        signal.pause()\n        save(step, [order",
        )
    )
    (pod,) = cluster.start("a", script=str(script))
    cluster.publish(1, "a")
    wait_for(lambda: pod.step > 3, "it trains")
    pod.process.send_signal(signal.SIGINT)
    wait_for((cluster.shared / "saves").exists, "the checkpoint begins")
    pod.process.send_signal(signal.SIGINT)
    assert pod.wait() == 130
    assert pod.ending["reason"] == "Interrupted"
    assert not pod.ranks or not any(Path(f"/proc/{rank['pid']}").exists() for rank in pod.ranks)


def test_sigusr1_is_a_commit_and_training_goes_on(cluster: Any, wait_for: Wait) -> None:
    (pod,) = cluster.start("a", EVERY="1000000")  # no checkpoint except the requested one
    cluster.publish(1, "a")
    wait_for(lambda: pod.step > 3, "it trains")
    world, before = pod.world, pod.step
    pod.process.send_signal(signal.SIGUSR1)
    commit = wait_for(lambda: pod.status["checkpoints"].get("shared"), "a commit")
    assert commit["step"] >= before
    wait_for(lambda: pod.step > commit["step"] + 3, "it goes on")
    assert pod.world == world


def test_sigterm_reaches_a_script_without_the_loop(cluster: Any, wait_for: Wait) -> None:
    script = cluster.shared / "handles.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "folder = pathlib.Path(os.environ['TEST_DIR'])\n"
        "def save(*_):\n    (folder / 'handled').touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "(folder / 'running').touch()\n"
        "while True: time.sleep(0.05)\n"
    )
    (pod,) = cluster.start("a", script=str(script))
    cluster.publish(1, "a")
    wait_for((cluster.shared / "running").exists, "it runs")
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 75
    assert (cluster.shared / "handled").exists()


def test_rank_ending_while_others_train_is_an_application_error(cluster: Any, wait_for: Wait) -> None:
    cluster.settings["budgets"][0]["maxRestarts"] = 0
    a, b = cluster.start("a", STEPS="100000"), None
    script = cluster.shared / "leaves.py"
    source = (Path(__file__).parents[1] / "scripts" / "speaks.py").read_text()
    script.write_text(
        source.replace("    if step == raise_at:\n", "    if step == 10:\n        sys.exit(0)\n    if 0:\n")
    )
    (b,) = cluster.start("b", script=str(script))
    cluster.publish(1, "a", "b")
    assert b.wait() != 0
    assert a[0].wait() != 0
    assert b.ending["cause"] == "Application"
    assert b.ending["reason"] == "EndedEarly"


def test_a_rank_leaves_no_children_behind(cluster: Any, wait_for: Wait) -> None:
    script = cluster.shared / "parent.py"
    script.write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "path = pathlib.Path(os.environ['TEST_DIR']) / ('child-' + os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "path.with_suffix('.tmp').write_text(str(child.pid)); path.with_suffix('.tmp').rename(path)\n"
        "time.sleep(1000)\n"
    )
    (pod,) = cluster.start("a", script=str(script))
    cluster.publish(1, "a")
    first = cluster.shared / "child-0"
    wait_for(first.exists, "the rank has a child")
    (rank,) = wait_for(lambda: pod.ranks, "the launcher says so")
    os.kill(rank["pid"], signal.SIGKILL)
    wait_for(lambda: not alive(int(first.read_text())), "the child is gone with its parent")
    wait_for((cluster.shared / "child-1").exists, "a new attempt")
    pod.process.kill()


def test_a_launcher_that_dies_takes_its_ranks_with_it(cluster: Any, wait_for: Wait) -> None:
    (pod,) = cluster.start("a")
    cluster.publish(1, "a")
    wait_for(lambda: pod.step > 0, "it trains")
    pid = pod.ranks[0]["pid"]
    pod.process.kill()
    wait_for(lambda: not alive(pid), "the rank is gone")


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_restarted_launcher_keeps_its_promises(cluster: Any, wait_for: Wait) -> None:
    (pod,) = cluster.start("a")
    cluster.publish(1, "a")
    first = cluster.await_world(1, "a")
    wait_for(lambda: pod.step > 3, "it trains")
    pod.process.kill()
    pod.process.wait()
    kept = pod.status["accepted"]
    pod.restart()
    second = cluster.await_world(1, "a", above=first)
    assert (kept["generation"], kept["attempt"]) == first < second
    wait_for(lambda: pod.status["incidents"] and pod.status["incidents"][0]["resumedTime"], "it goes on")
    (incident,) = pod.status["incidents"]
    assert (incident["generation"], incident["attempt"]) == first
    assert (incident["cause"], incident["reason"]) == ("Infrastructure", "LauncherEnded")
    assert incident["lostSteps"] is not None


def test_the_operators_directives_reach_the_ranks(cluster: Any, wait_for: Wait) -> None:
    a, b, c = cluster.start("a", "b", "c", EVERY="1000000")  # no checkpoint except the requested one
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: min(pod.step for pod in (a, b, c)) > 3, "they train")
    before = a.status["checkpoints"].get("shared")
    wish = {"id": "before-upgrade", "deadline": None, "reason": "an upgrade"}
    cluster.publish(1, "a", "b", "c", directives={"checkpoint": wish, "drain": []})
    wait_for(lambda: a.status["checkpoints"].get("shared") != before, "a commit")
    cluster.publish(1, "a", "b", "c", directives={"checkpoint": wish, "drain": ["uid-c"]})
    assert c.wait() == 75
    cluster.await_world(1, "a", "b", above=(1, 1))
    assert a.status["incidents"] == [], cluster.tail()


AS_PID_1 = ("unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "holdfast", "run")
SLOW_IMPORT = """
import pathlib, sys, time
here = pathlib.Path(__file__).parent
(here / "importing").touch()
while not (here / "go").exists():
    time.sleep(0.01)
sys.path.remove(str(here))
del sys.modules[__name__]
import argparse
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a PID namespace without more")
def test_as_pid_1_it_heeds_a_sigterm_that_comes_while_it_starts(tmp_path: Path, wait_for: Wait) -> None:
    """The kubelet sends SIGTERM once, for example to a pod that is deleted immediately. If lost, it costs the
    grace period."""
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "argparse.py").write_text(SLOW_IMPORT)
    paths = os.pathsep.join([str(shadow), os.environ.get("PYTHONPATH", "")])
    environ = {
        "PYTHONPATH": paths,
        "HOLDFAST_RUN_DIR": str(tmp_path / "run"),
        "HOLDFAST_POD_UID": "uid",
        "HOLDFAST_POD_IP": "127.0.0.1",
        "HOLDFAST_CONTROL_PORT": "0",
        "HOLDFAST_TERMINATION_LOG": str(tmp_path / "termination"),
    }
    launcher = subprocess.Popen([*AS_PID_1, "--", "sleep", "60"], env={**os.environ, **environ})
    try:
        wait_for((shadow / "importing").exists, "the imports")
        os.kill(int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()), signal.SIGTERM)
        (shadow / "go").touch()
        assert launcher.wait(240) == 75
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a PID namespace without more")
def test_as_pid_1_it_starts_processes_that_heed_sigterm(tmp_path: Path) -> None:
    environ = {**os.environ, "HOLDFAST_TERMINATION_LOG": str(tmp_path / "termination")}
    command = [*AS_PID_1, "--", "grep", "SigBlk", "/proc/self/status"]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert said.returncode == 0, said.stderr
    assert int(said.stdout.split()[1], 16) == 0
