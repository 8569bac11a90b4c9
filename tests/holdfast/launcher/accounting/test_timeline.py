"""What a launcher writes to the timeline, and what `holdfast timeline` prints for it, also from a corrupt file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import timeline
from holdfast.cli.run_options import parse
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import UsageError
from holdfast.core.protocol import Cause
from holdfast.launcher.accounting.event_recorder import EventRecorder
from holdfast.launcher.accounting.timeline import Timeline, rotated
from holdfast.launcher.membership.messages import Failure, Master, Priority, World
from holdfast.launcher.membership.state import Attempt, State

ACCOUNT = {"activity": "data", "wall": 1.0, "open": 0.0, "seconds": {"productive": 1.0}}


class Run:
    """The timeline of a launcher with one rank, on its own clock."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.now = 1_769_860_800.0
        self.path = path
        self.chronicle = EventRecorder(lambda: self.now, Timeline(path, lambda: self.now, **options))
        self.chronicle.begin(pod="gpt-w0", job="gpt")
        self.enters()

    def enters(self) -> None:
        self.chronicle.heard(31, "hello", {"localRank": 0})
        self.chronicle.heard(31, "account", ACCOUNT)
        self.chronicle.heard(31, "restored", {"step": 0})

    def enters_world(self, attempt: int) -> None:
        world = World(attempt_id=AttemptId(1, attempt), publication="p", members=(), coordinator="")
        entered = Attempt(world=world, master=Master(host="127.0.0.1", port=1), since=self.now)
        self.chronicle.follow(State(me="uid-w0"), State(me="uid-w0", attempt=entered))

    def steps(self, first: int, last: int, *, seconds: float = 0.25, world: int = 3) -> None:
        for step in range(first, last + 1):
            self.now += seconds
            body = {
                "step": step,
                "loss": 5.0 / step,
                "samples": 64,
                "seconds": seconds,
                "lr": 0.1,
                "worldSize": world,
            }
            self.chronicle.heard(31, "step", body)
            self.chronicle.heard(31, "step", body)  # another rank reports the same

    def fails(self, message: str = "rank 1 (pid 31) was ended by SIGKILL") -> None:
        failure = Failure(
            cause=Cause.INFRASTRUCTURE, reason="RankKilled", message=message, priority=Priority.KILLED, step=8
        )
        state = State(me="uid-w0")
        self.now += 0.02
        self.chronicle.follow(state, State(me="uid-w0", failed=AttemptId(1, 1), failure=failure))
        self.now += 0.1
        self.enters()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "timeline.jsonl")
    made.steps(1, 8)
    made.fails()
    made.steps(9, 16, world=2)
    made.chronicle.heard(31, "checkpoint", {"step": 16, "tier": "shared", "result": "Committed", "seconds": 0.1})
    made.chronicle.close(0, "Complete")
    return made


def test_what_is_rare_is_written_always_and_steps_once_a_second(run: Run) -> None:
    kinds = [line["kind"] for line in run.lines]
    assert kinds == [
        *("start", "step", "step", "failure", "recovery"),
        *("step", "step", "checkpoint", "end"),
    ]
    steps = [line for line in run.lines if line["kind"] == "step"]
    assert [(line["step"], line["worldSize"]) for line in steps] == [(1, 3), (5, 3), (9, 2), (13, 2)]
    assert steps[0].keys() == {"t", "kind", "step", "loss", "worldSize", "lr", "samples", "seconds"}
    (recovery,) = (line for line in run.lines if line["kind"] == "recovery")
    assert sum(recovery["phases"].values()) == pytest.approx(0.02 + 0.1 + 0.25)


def test_restore_from_a_tier_is_written_once_with_its_loss(run: Run) -> None:
    bad = {"path": "step-8.g1.a1", "reason": "MANIFEST.json is missing"}
    told = {"step": 4, "source": "checkpoint", "stores": ["/ckpt"], "quarantined": [bad], "lost": [bad]}
    for pid in (31, 32):
        run.chronicle.heard(pid, "restored", told)
    run.chronicle.heard(31, "restored", {"step": 4, "source": "memory", "stores": [], "lost": []})
    (line,) = (line for line in run.lines if line["kind"] == "restore")
    assert (line["step"], line["stores"], line["lost"]) == (4, ["/ckpt"], ["step-8.g1.a1"])
    assert "step 4 from /ckpt; lost: step-8.g1.a1" in timeline.render(timeline.read(run.path))


@pytest.mark.parametrize("majority", [True, False])
def test_divergence_is_written_once_for_all_ranks(run: Run, majority: bool) -> None:
    told = {"step": 8, "ranks": [1, 2], "majority": majority, "tensor": "model/weight"}
    for pid in (31, 32):
        run.chronicle.heard(pid, "diverged", told)
    (line,) = (line for line in run.lines if line["kind"] == "divergence")
    assert (line["step"], line["ranks"], line["tensor"], line["repaired"]) == (8, [1, 2], "model/weight", majority)
    outcome = "repaired" if majority else "no state has a majority"
    shown = timeline.render(timeline.read(run.path))
    assert f"step 8: rank 1, 2 differs, first in model/weight; {outcome}" in shown


def test_same_divergence_in_the_next_world_is_written_again(run: Run) -> None:
    told = {"step": 8, "ranks": [1], "majority": True, "tensor": "model/weight"}
    for attempt in (1, 2):
        run.enters_world(attempt)
        for pid in (31, 32):
            run.chronicle.heard(pid, "diverged", told)
    kinds = [line["kind"] for line in run.lines if line["kind"] in {"world", "divergence"}]
    assert kinds == ["world", "divergence"] * 2


def test_a_commit_that_failed_is_written_once_with_its_cause(run: Run) -> None:
    told = {"step": 20, "tier": "shared", "result": "Failed", "seconds": 0.1, "cause": "Full"}
    for pid in (31, 32):
        run.chronicle.heard(pid, "checkpoint", told)
    assert [line.get("cause") for line in run.lines if line["kind"] == "checkpoint"] == [None, "Full"]
    assert "step 20 shared: Failed (Full)" in timeline.render(timeline.read(run.path))


def test_skipped_steps_and_roll_backs_are_written_once_for_all_ranks(run: Run) -> None:
    run.chronicle.heard(32, "hello", {"localRank": 1})
    for step, lowered in ((17, False), (18, True)):
        for pid in (31, 32):
            run.chronicle.heard(pid, "skipped", {"step": step, "lowered": lowered})
    for pid in (31, 32):
        run.chronicle.heard(pid, "rolledBack", {"step": 18, "message": "the job rolls back", "samples": 128})
    told = [{name: line[name] for name in line if name != "t"} for line in run.lines[-3:]]
    assert told == [
        {"kind": "skipped", "step": 17, "lowered": False},
        {"kind": "skipped", "step": 18, "lowered": True},
        {"kind": "rollback", "step": 18, "samples": 128},
    ]
    shown = timeline.render(timeline.read(run.path))
    assert "skipped    step 17\n" in shown
    assert "skipped    step 18; the learning rate is lowered\n" in shown
    assert "rollback   after step 18; 128 samples are excluded" in shown


def test_spike_is_written_once_for_all_ranks(run: Run) -> None:
    run.chronicle.heard(32, "hello", {"localRank": 1})
    for pid in (31, 32):
        run.chronicle.heard(pid, "spike", {"step": 17, "quantity": "loss", "value": 9.5, "usual": 2.0})
    assert [line["kind"] for line in run.lines].count("spike") == 1
    assert "spike      step 17; the loss is 9.5, usually 2.0" in timeline.render(timeline.read(run.path))


def test_skipped_samples_are_written_once_with_their_errors(run: Run) -> None:
    run.chronicle.heard(32, "hello", {"localRank": 1})
    samples = [{"sample": 7204, "rank": 1, "step": 17, "error": "OSError: [Errno 5] Input/output error"}]
    for pid in (31, 32):
        run.chronicle.heard(pid, "badSamples", {"step": 17, "number": 1, "samples": samples})
    assert [line["kind"] for line in run.lines].count("unreadable") == 1
    shown = timeline.render(timeline.read(run.path))
    assert "step 17; cannot be read: sample 7204 (rank 1, OSError: [Errno 5] Input/output error)" in shown


def test_each_rank_that_is_out_of_gpu_memory_is_named(run: Run) -> None:
    for pid, micro_batch in ((31, 0), (32, 4)):
        body = {"step": 17, "rank": pid - 31, "microBatch": micro_batch, "message": "rank 0 is out of GPU memory"}
        run.chronicle.heard(pid, "outOfMemory", body)
    shown = timeline.render(timeline.read(run.path))
    assert "rank 0 after step 17; the step is repeated with empty caches" in shown
    assert "rank 1 after step 17; the step is repeated with micro-batches of size 4" in shown


def test_a_restore_that_is_not_exact_says_how_near_it_is(run: Run) -> None:
    near = "2 of 9 tensors are within 0.001 of the saved value, the others are exact"
    told = {"step": 4, "stores": ["/ckpt"], "lost": [], "inexact": near}
    run.chronicle.heard(31, "restored", told)
    (line,) = (line for line in run.lines if line["kind"] == "restore")
    assert line["inexact"] == near
    assert f"step 4 from /ckpt; {near}" in timeline.render(timeline.read(run.path))


def test_slow_ranks_are_written_when_they_change(run: Run) -> None:
    slow = {"rank": 1, "seconds": 0.41, "medianSeconds": 0.12, "activity": "compute"}
    run.chronicle.heard(31, "slowRanks", {"ranks": [slow]})
    run.chronicle.heard(31, "slowRanks", {"ranks": []})
    assert [line["ranks"] for line in run.lines if line["kind"] == "slow"] == [[slow], []]
    shown = timeline.render(timeline.read(run.path))
    assert "rank 1 (0.41 s per step, median 0.12 s)" in shown
    assert "no rank any more" in shown


def test_the_file_is_bounded_and_its_older_part_is_read_too(tmp_path: Path) -> None:
    run = Run(tmp_path / "timeline.jsonl", max_bytes=4000)
    run.steps(1, 300, seconds=1.0)
    sizes = [path.stat().st_size for path in (run.path, rotated(run.path))]
    assert max(sizes) <= 4000
    story = timeline.read(run.path)
    assert len(story.entries) > len(run.lines)
    assert story.entries[-1]["step"] == 300


def test_launcher_after_a_killed_one_starts_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text('{"t": 1.0, "kind": "start"}\n{"t": 2.0, "ki')
    Run(path)
    story = timeline.read(path)
    assert (len(story.entries), story.skipped) == (2, 1)


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "no such folder" / "timeline.jsonl")
    run.steps(1, 3)
    assert run.chronicle.accounts.steps == 3


def test_terminal_shows_loss_world_size_failures_and_recoveries(run: Run) -> None:
    shown = timeline.render(timeline.read(run.path))
    assert "step 1 to 13, 1 failure" in shown
    assert "5 → 0.3846" in shown
    assert "3 → 2" in shown
    assert "failure    Infrastructure RankKilled: rank 1 (pid 31) was ended by SIGKILL" in shown
    assert "0.37 s after the last step (detection 0.02, restart 0.10, sync 0.00, step 0.25), at step 9" in shown
    assert "× failure, o recovered" in shown


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        ('{"t": 1769860801.0, "kind": "step", "step": 2, "lo', 1),
        ('{"t": "soon", "kind": "step"}', 1),
        ('{"t": true, "kind": "step"}', 1),
        ('{"kind": "step"}', 1),
        ("[1, 2]", 1),
        ("[" * 100_000, 1),
        ("\x00\x01", 1),
        ('{"t": 1769860801.0, "kind": "of a later release"}', 0),
        ('{"t": 1769860801.0, "kind": "step", "step": "x", "loss": null, "worldSize": []}', 0),
        ('{"t": 1769860801.0, "kind": "step", "loss": NaN, "worldSize": Infinity}', 0),
        ('{"t": 1769860801.0, "kind": "recovery", "phases": 3}', 0),
        ('{"t": 1769860801.0, "kind": "failure"}', 0),
    ],
)
def test_bad_lines_are_skipped_and_counted(run: Run, line: str, counted: int) -> None:
    with run.path.open("a") as file:
        file.write(line)
    story = timeline.read(run.path)
    assert story.skipped == counted
    assert ("unreadable lines skipped" in timeline.render(story)) == bool(counted)


def test_a_message_cannot_steer_the_terminal(tmp_path: Path) -> None:
    run = Run(tmp_path / "timeline.jsonl")
    run.fails("\x1b[2J\r\x07gone")
    assert "\x1b" not in timeline.render(timeline.read(run.path))


def test_an_empty_file_shows_nothing_and_a_missing_one_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert timeline.render(timeline.read(empty)) == "nothing to show"
    with pytest.raises(UsageError, match=r"missing\.jsonl cannot be read: No such file"):
        timeline.read(tmp_path / "missing.jsonl")


def test_without_matplotlib_a_picture_says_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'holdfast-trainer\[plot\]'"):
        timeline.draw(timeline.read(run.path), tmp_path / "picture.png")


def test_a_picture_is_drawn(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    timeline.draw(timeline.read(run.path), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="cannot be drawn"):
        timeline.draw(timeline.read(run.path), tmp_path / "picture.what")


def test_the_command_shows_a_file(run: Run) -> None:
    command = [sys.executable, "-m", "holdfast", "timeline", str(run.path)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "RankKilled" in shown.stdout
    wrong = subprocess.run(command[:-1], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert "FILE" in wrong.stderr


def test_a_run_can_be_told_where_to_write_it() -> None:
    assert parse(["run", "--", "python", "train.py"]).timeline is None
    told = parse(["run", "--timeline", "run.jsonl", "--", "python", "train.py"]).timeline
    assert told == Path.cwd() / "run.jsonl"
