"""`holdfast run` without an operator: on one host, and on several that meet at an endpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.ports import free_port

Wait = Callable[..., Any]
SCRIPTS = Path(__file__).parents[1] / "scripts"
JOB_SCRIPTS = Path(__file__).parents[2] / "training" / "scripts"
DEADLINE = 240.0


class Host:
    """A launcher that is started by hand."""

    def __init__(self, folder: Path, name: str, *words: str, **environ: str) -> None:
        self.log = folder / f"{name}.log"
        self.run_dir = folder / f"run-{name}"
        base = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "TEST_DIR": str(folder),
            "HOLDFAST_RUN_DIR": str(self.run_dir),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "run", *words], env=base | environ, stdout=log, stderr=log
            )

    @property
    def status(self) -> dict[str, Any]:
        """The status of the launcher."""
        return dict(json.loads((self.run_dir / "status.json").read_text()))


Start = Callable[..., Host]


@pytest.fixture
def start(memory: Path) -> Iterator[Start]:
    hosts: list[Host] = []

    def begin(*words: str, **environ: str) -> Host:
        hosts.append(Host(memory, str(len(hosts)), *words, **environ))
        return hosts[-1]

    yield begin
    for host in hosts:
        if host.process.poll() is None:
            host.process.kill()
        host.process.wait()


def saw(host: Host, text: str) -> Callable[[], bool]:
    return lambda: text in host.log.read_text()


def test_a_torchrun_script_runs_unmodified_on_one_host(start: Start, memory: Path) -> None:
    host = start("--nproc-per-node", "2", "--", sys.executable, str(SCRIPTS / "reduces.py"))
    assert host.process.wait(DEADLINE) == 0, host.log.read_text()
    assert [(memory / f"sum-{rank}").read_text() for rank in range(2)] == ["3 of 2"] * 2


def test_a_python_file_needs_no_interpreter_before_it(start: Start, memory: Path) -> None:
    (memory / "finish").touch()
    host = start("--nproc_per_node=1", str(SCRIPTS / "waits.py"))
    assert host.process.wait(DEADLINE) == 0, host.log.read_text()
    assert (memory / "env-0-0.json").exists()


def test_a_killed_rank_is_started_again(start: Start, memory: Path, wait_for: Wait) -> None:
    host = start("--prefix-output", "--", sys.executable, str(SCRIPTS / "waits.py"))
    first = memory / "env-0-0.json"
    wait_for(first.exists, "the first attempt runs")
    os.kill(int(first.read_text().rsplit('"pid": ', 1)[1].rstrip("}")), signal.SIGKILL)
    wait_for((memory / "env-0-1.json").exists, "the second attempt runs")
    (memory / "finish").touch()
    assert host.process.wait(DEADLINE) == 0
    assert host.log.read_text().count("[0] rank 0 runs") == 2


def test_two_launchers_meet_at_an_endpoint(start: Start, memory: Path, wait_for: Wait) -> None:
    words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--", sys.executable)
    hosts = [start(*words, str(SCRIPTS / "waits.py")) for _ in range(2)]
    wait_for(lambda: (memory / "env-1-0.json").exists() and (memory / "env-0-0.json").exists(), "both run")
    (memory / "finish").touch()
    assert [host.process.wait(DEADLINE) for host in hosts] == [0, 0]


def shards(*hosts: Host) -> dict[int, Any]:
    """Return the final weights by shard. They are equal on both ranks that hold the shard."""
    said = [line for host in hosts for line in host.log.read_text().splitlines()]
    lines = [json.loads(line) for line in said if line.startswith('{"losses"')]
    found = {one["shard"]: one["weights"] for one in lines}
    assert sorted(one["shard"] for one in lines) == [0, 0, 1, 1], said
    assert all(one["weights"] == found[one["shard"]] for one in lines)
    assert all(one["audit"].startswith("exactly once") for one in lines)
    return found


@pytest.mark.thorough
def test_sharded_model_gets_shards_of_killed_ranks_back_exactly(start: Start) -> None:
    """Two replicas of two ranks under one launcher. The slot of a process identifies the killed rank."""
    words = ("--nproc-per-node", "4", "--warm-processes", "none", "--", sys.executable)
    script = (str(JOB_SCRIPTS / "sharded.py"), "--steps", "10", "--faults")
    undisturbed = start(*words, *script, "")
    assert undisturbed.process.wait(DEADLINE) == 0, undisturbed.log.read_text()
    hurt = start(*words, *script, "backward:1:4,vote:2:7")
    assert hurt.process.wait(DEADLINE) == 0, hurt.log.read_text()
    assert hurt.log.read_text().count("from memory at step") >= 2
    assert shards(hurt) == shards(undisturbed)


@pytest.mark.thorough
def test_in_a_sharded_model_the_rank_asleep_in_forward_hangs(start: Start) -> None:
    """The other rank of its shard group waits."""
    words = ("--nproc-per-node", "4", "--warm-processes", "none", "--hang-min-timeout", "1", "--", sys.executable)
    host = start(*words, str(JOB_SCRIPTS / "sharded.py"), "--steps", "14", "--faults", "asleep:1:8")
    assert host.process.wait(DEADLINE) == 0, host.log.read_text()
    lines = [json.loads(line) for line in host.log.read_text().splitlines() if line.startswith('{"ts"')]
    told = [line for line in lines if line.get("reason") == "Hung"]
    assert [line["rank"] for line in told] == [1]
    assert "waiting: ranks 0, 2, 3 for its gradients" in told[0]["msg"]


@pytest.mark.thorough
def test_replica_across_hosts_waits_for_its_host_and_continues(start: Start, wait_for: Wait) -> None:
    """One of two replicas of two hosts each is lost. The remaining hosts are no majority, and keep their shards."""
    run = ("--nnodes", "2:4", "--replica-step", "2", "--warm-processes", "none")
    script = (sys.executable, str(JOB_SCRIPTS / "sharded.py"), "--steps", "30", "--pause", "0.1")
    words = (*run, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--", *script)
    hosts = [start(*words)]
    wait_for((hosts[0].run_dir / "status.json").exists, "the endpoint is there")
    hosts += [start(*words) for _ in range(3)]
    wait_for(lambda: (hosts[0].status["committedStep"] or 0) > 3, "four train")
    hosts.pop().process.kill()
    wait_for(lambda: "are not a majority" in hosts[0].status["message"], "the others wait")
    hosts.append(start(*words))
    assert [host.process.wait(DEADLINE) for host in hosts] == [0] * 4, [host.log.read_text() for host in hosts]
    assert hosts[0].status["accounting"]["lostSteps"] == 0
    assert "from memory at step" in hosts[0].log.read_text()
    shards(*hosts)


def test_a_lost_host_is_left_behind_and_a_new_one_taken_in(start: Start, wait_for: Wait) -> None:
    words = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--", sys.executable)
    first = start(*words, str(SCRIPTS / "speaks.py"))
    wait_for((first.run_dir / "status.json").exists, "the endpoint is there")
    second = start(*words, str(SCRIPTS / "speaks.py"))
    wait_for(saw(first, "training with 2 of 2 workers"), "two train")
    second.process.kill()
    wait_for(saw(first, "training with 1 of 1 workers"), "one goes on")
    third = start(*words, str(SCRIPTS / "speaks.py"))
    wait_for(saw(third, "training with 2 of 2 workers"), "two train again")


def test_extra_hosts_are_on_standby_and_replace_a_lost_one(start: Start, wait_for: Wait) -> None:
    words = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--", sys.executable)
    first = start(*words, str(SCRIPTS / "speaks.py"))
    wait_for((first.run_dir / "status.json").exists, "the endpoint is there")
    second = start(*words, str(SCRIPTS / "speaks.py"))
    wait_for(saw(first, "training with 2 of 2 workers"), "two train")
    third = start(*words, str(SCRIPTS / "speaks.py"))
    status = third.run_dir / "status.json"
    wait_for(lambda: status.exists() and "on standby" in status.read_text(), "the third waits")
    second.process.kill()
    wait_for(saw(third, "training with 2 of 2 workers"), "it takes the place")


def test_a_host_with_another_number_of_processes_is_refused(start: Start, wait_for: Wait) -> None:
    words = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    script = ("--", sys.executable, str(SCRIPTS / "speaks.py"))
    first = start(*words, *script)
    wait_for((first.run_dir / "status.json").exists, "the endpoint is there")
    second = start(*words, "--nproc-per-node", "2", *script)
    assert second.process.wait(DEADLINE) == 70
    assert "--nproc-per-node is 2 here and 1 at --rdzv-endpoint: set the same" in second.log.read_text()
    wait_for(saw(first, "was refused"), "the endpoint says so")
    assert first.process.poll() is None


def test_the_endpoints_loss_ends_the_run(start: Start, wait_for: Wait) -> None:
    words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--", sys.executable)
    first = start(*words, str(SCRIPTS / "speaks.py"))
    wait_for((first.run_dir / "status.json").exists, "the endpoint is there")
    second = start(*words, str(SCRIPTS / "speaks.py"))
    wait_for(saw(second, "training with 2 of 2 workers"), "two train")
    first.process.kill()
    assert second.process.wait(DEADLINE) == 70
    assert "the launcher at --rdzv-endpoint is lost" in second.log.read_text()


def test_another_key_is_refused_at_the_endpoint(start: Start, memory: Path, wait_for: Wait) -> None:
    for name in ("one", "other"):
        (memory / name).write_text(name * 20)
    words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--", sys.executable)
    first = start(*words, str(SCRIPTS / "waits.py"), HOLDFAST_JOB_KEY_FILE=str(memory / "one"))
    wait_for((first.run_dir / "status.json").exists, "the endpoint is there")
    second = start(*words, str(SCRIPTS / "waits.py"), HOLDFAST_JOB_KEY_FILE=str(memory / "other"))
    assert second.process.wait(DEADLINE) == 70
    assert "does not have this job's key" in second.log.read_text()
    wait_for(lambda: first.status["refusedPeers"], "it is counted")
    assert first.process.poll() is None


def test_ctrl_c_ends_everything(start: Start, memory: Path, wait_for: Wait) -> None:
    host = start("--", sys.executable, str(SCRIPTS / "waits.py"))
    file = memory / "env-0-0.json"
    wait_for(file.exists, "it runs")
    pid = int(file.read_text().rsplit('"pid": ', 1)[1].rstrip("}"))
    host.process.send_signal(signal.SIGINT)
    assert host.process.wait(DEADLINE) == 75
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the rank is gone")


def test_the_launcher_does_without_torch() -> None:
    parts = "import sys, holdfast.cli.main, holdfast.launcher.main"
    code = f"{parts}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def in_one_folder(start: Start, memory: Path, wait_for: Wait) -> tuple[Host, Host]:
    """A training run, and a second one with the same checkpoint folder."""

    def run() -> Host:
        folder = str(memory / "ckpt")
        return start("--", sys.executable, str(SCRIPTS / "waits.py"), HOLDFAST_CHECKPOINT_DIR=folder)

    first = run()
    wait_for((memory / "env-0-0.json").exists, "the first run trains")
    return first, run()


@pytest.mark.thorough
def test_second_run_in_a_folder_is_refused_during_the_first(in_one_folder: tuple[Host, Host], memory: Path) -> None:
    """The second run would start above the claims of the first, and later checkpoints of the first would be lost."""
    first, second = in_one_folder
    assert second.process.wait(DEADLINE) == 2
    said = f"has its checkpoints in {memory / 'ckpt'}: stop it, or use another folder for this run"
    assert f"-{first.process.pid} {said}" in second.log.read_text()
    assert first.process.poll() is None


def test_a_run_takes_over_the_folder_of_one_that_was_killed(
    in_one_folder: tuple[Host, Host], memory: Path, wait_for: Wait
) -> None:
    first, second = in_one_folder
    wait_for(saw(second, "waiting 15 s for its end"), "the second one waits")
    first.process.kill()
    (memory / "finish").touch()
    assert second.process.wait(DEADLINE) == 0, second.log.read_text()


@pytest.mark.thorough
def test_a_ported_script_is_not_disturbed_by_hang_detection(start: Start) -> None:
    """The script evaluates for 90 s in its loop body, writes to a slow disk, and compiles again for a late shape."""
    words = ("--nproc-per-node", "2", "--warm-processes", "none", "--", sys.executable, str(SCRIPTS / "nanogpt.py"))
    host = start(*words, EVALUATES="90", SAVES="70")
    assert host.process.wait(500) == 0, host.log.read_text()
    log = host.log.read_text()
    assert "done at 80 in attempt 1 traced 2" in log
    assert host.status["incidents"] == []
    assert log.count("uses its CPU: no step has taken this long") == 1
    assert log.count("has stopped using its CPU: no step has taken this long") == 1
