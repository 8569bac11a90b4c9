"""Bar recovery-10: the accounts of a training's time add up, and a delay counts in its own category only.

A real launcher runs a real script, which is killed once and restores a checkpoint. Each round runs it without a
delay, and once with a delay in each category. The delay's category must rise by it; the category that changes most
otherwise shows how much is accounted wrongly. The times of a start, a restart and a second launcher vary. Their rise
is therefore compared with the rise in the script's own records or the launchers' timelines. A hang is timed by the
script and by the timeline; both its ranks wait for it.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _bench as bench

SCRIPT = Path(__file__).with_name("_accounting_rank.py")
CAUSES = ("startup", "data", "checkpoint", "evaluation", "restart", "recompute", "productive")
DELAY = 2.0
PATIENCE = 240.0
TIGHT = 0.05
NOWHERE = ("step-began", "waits")


@dataclass(frozen=True, kw_only=True)
class Books:
    """The accounts in a launcher's last status, and the script's own times of start and restart."""

    seconds: Mapping[str, float]
    wall: float
    unattributed: float
    clocked: Mapping[str, float]

    @classmethod
    def read(cls, run_dir: Path, began: float) -> Books:
        """Read the run directory of a launcher that was started at this time and has exited."""
        told = json.loads((run_dir / "status.json").read_text())["accounting"]
        if told is None:
            raise SystemExit(f"no rank told its books; see {run_dir}")
        in_place, died, again = (_moment(run_dir / name) for name in ("in-place", "died", "again"))
        return cls(
            seconds=told["seconds"],
            wall=told["wallSeconds"],
            unattributed=told["unattributedSeconds"],
            clocked={"startup": in_place - began, "restart": again - died},
        )

    @property
    def gap(self) -> float:
        """The unattributed time in percent of the wall time."""
        return 100 * abs(self.unattributed) / self.wall


def _moment(note: Path) -> float:
    """Return the time of a script's record; a run without a kill has none."""
    return float(note.read_text() or "nan") if note.exists() else float("nan")


def start(folder: Path, name: str, options: Sequence[str], slow: Sequence[str] = (), delay: float = DELAY) -> Any:
    """Start a launcher with the script. Its output goes to a log in its run directory."""
    run_dir = folder / name
    run_dir.mkdir()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")},
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_RUN_DIR": str(run_dir),
        "HOLDFAST_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "SLOW": ",".join(slow),
        "DELAY": str(delay),
    }
    command = [
        sys.executable,
        "-m",
        "holdfast",
        "run",
        "--checkpoint-interval",
        "5",
        "--hang-min-timeout",
        "1",
        *options,
    ]
    with (run_dir / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--", sys.executable, str(SCRIPT)], env=environment, stdout=log, stderr=log
        )


def finish(launcher: Any) -> None:
    """Wait for the launcher's end."""
    try:
        code = launcher.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        raise SystemExit("a launcher did not end in time") from None
    finally:
        launcher.kill()
    if code != 0:
        raise SystemExit(f"a launcher ended with {code}")


def alone(slow: Sequence[str] = (), delay: float = DELAY) -> Books:
    """Run one launcher with one rank."""
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        began = time.time()
        finish(start(Path(name), "a", [], slow, delay))
        return Books.read(Path(name) / "a", began)


def waiting(delay: float) -> tuple[float, float]:
    """Run two launchers, one of them late. Return the first one's idle time, and the delay of the second."""
    with tempfile.TemporaryDirectory(prefix="hf-") as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{probe.getsockname()[1]}"]
        probe.close()
        folder = Path(name)
        first = start(folder, "a", options)
        (folder / "a" / "died").touch()
        time.sleep(1.0 + delay)
        second = start(folder, "b", options)
        (folder / "b" / "died").touch()
        try:
            finish(first)
        finally:
            second.wait() if first.returncode == 0 else second.kill()
        began = [_line(folder / launcher, "start") for launcher in "ab"]
        return Books.read(folder / "a", began[0]).seconds["idle"], began[1] - began[0]


def _line(run_dir: Path, kind: str) -> float:
    """Return the time of a launcher's first timeline entry of this kind."""
    lines = map(json.loads, (run_dir / "timeline.jsonl").read_text().splitlines())
    return float(next(line["t"] for line in lines if line["kind"] == kind))


def hanging() -> tuple[Books, float]:
    """Run two ranks, one of which hangs. Return the accounts, and the true seconds without progress over both ranks,
    until the launcher detects the hang: the hung rank's from the start of its step, the other's from its wait."""
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        folder, began = Path(name), time.time()
        finish(start(folder, "a", ["--nproc-per-node", "2"], ["detection"]))
        failed = _line(folder / "a", "failure")
        return Books.read(folder / "a", began), sum(failed - _moment(folder / "a" / note) for note in NOWHERE)


@dataclass(frozen=True, kw_only=True)
class Round:
    """The measurements of one round: rises in percent of the delay, and gaps."""

    own: Mapping[str, float]
    others: Mapping[str, float]
    gaps: Sequence[float]


def once_each(causes: Sequence[Sequence[str]]) -> Round:
    """Run once without and once with each delay, in random order."""
    order = [(), *map(tuple, causes)]
    runs = {group: alone(group) for group in random.sample(order, len(order))}
    usual = runs.pop(())
    own: dict[str, float] = {}
    others: dict[str, float] = {}
    for group, books in runs.items():
        rises = {cause: books.seconds[cause] - usual.seconds[cause] for cause in usual.seconds}
        own |= {cause: 100 * rises.pop(cause) / _true_rise(cause, usual, books) for cause in group}
        others["+".join(group)] = 100 * max(map(abs, rises.values())) / DELAY
    (idle, late), (idle_usually, late_usually) = waiting(DELAY), waiting(0.0)
    return Round(
        own=own | {"idle": 100 * (idle - idle_usually) / (late - late_usually)},
        others=others,
        gaps=[books.gap for books in (usual, *runs.values())],
    )


def _true_rise(cause: str, usual: Books, books: Books) -> float:
    """Return by how many seconds the time of this category is longer, by another clock than the accounts'."""
    return books.clocked[cause] - usual.clocked[cause] if cause in books.clocked else DELAY


def main() -> int:
    effort = bench.arguments("Whether a training's time is booked where it belongs")
    groups = [CAUSES] if effort.quick else [(cause,) for cause in CAUSES]
    rounds = [once_each(groups) for _ in range(effort.pick(quick=1, default=10, full=30))]
    hangs = [hanging() for _ in range(effort.pick(quick=1, default=10, full=30))]
    rows = [
        bench.measured(
            "recovery-10",
            "unattributed, % of the wall time of all ranks, worst",
            [gap for one in rounds for gap in one.gaps] + [books.gap for books, _ in hangs],
            "%",
            target="<= 1",
            at=1.0,
        )
    ]
    causes = (*CAUSES, "idle")
    rows += [_rise(f"{DELAY:.0f} s more of {cause}", [one.own[cause] for one in rounds]) for cause in causes]
    rows.append(_rise("a hang, both ranks", [100 * books.seconds["detection"] / took for books, took in hangs]))
    for group in rounds[0].others:
        what = f"largest change of another cause, {group}"
        rows.append(bench.measured("recovery-10", what, [one.others[group] for one in rounds], "% of the delay"))
    return bench.finish("accounting", rows, effort)


def _rise(what: str, values: Sequence[float]) -> bench.Measurement:
    """Return the row of accounted seconds in percent of the true ones, judged by the median's deviation."""
    off = abs(statistics.median(values) - 100) <= 100 * TIGHT
    row = bench.measured("recovery-10", f"{what}: booked on its cause, % of it", values, "%")
    return bench.Measurement(**{**vars(row), "target": "100 ± 5", "held": off})


if __name__ == "__main__":
    sys.exit(main())
