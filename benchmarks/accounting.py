"""Bar recovery-10: a training's time adds up, and a delay is booked on its own cause and on no other.

A real launcher and a real script, which is killed once and restores a checkpoint. Each round runs it as it is and
with a delay in one place, for each place. A delay's own cause must rise by it; the cause that changes most beside it
tells how much is booked wrongly. A start, a restart and a second launcher never take equally long: their rise is set
beside the rise by the script's own notes or the launchers' timelines. A hang is timed by the script and by the
timeline; both its ranks wait for it.
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
    """What a launcher's last status says of its time, and what the script's clock says of the start and restart."""

    seconds: Mapping[str, float]
    wall: float
    unattributed: float
    clocked: Mapping[str, float]

    @classmethod
    def read(cls, run_dir: Path, began: float) -> Books:
        """From the run directory of a launcher that was started at this time and has left."""
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
        """Unattributed time in hundredths of the wall time."""
        return 100 * abs(self.unattributed) / self.wall


def _moment(note: Path) -> float:
    """When the script made a note; a run in which nobody died has none."""
    return float(note.read_text() or "nan") if note.exists() else float("nan")


def start(folder: Path, name: str, options: Sequence[str], slow: Sequence[str] = (), delay: float = DELAY) -> Any:
    """A launcher with the script; what it says goes to a log in its run directory."""
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
    command = [sys.executable, "-m", "holdfast", "run", "--checkpoint-interval", "5", *options]
    with (run_dir / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--", sys.executable, str(SCRIPT)], env=environment, stdout=log, stderr=log
        )


def finish(launcher: Any) -> None:
    """Wait for its end."""
    try:
        code = launcher.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        raise SystemExit("a launcher did not end in time") from None
    finally:
        launcher.kill()
    if code != 0:
        raise SystemExit(f"a launcher ended with {code}")


def alone(slow: Sequence[str] = (), delay: float = DELAY) -> Books:
    """One launcher, one rank."""
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        began = time.time()
        finish(start(Path(name), "a", [], slow, delay))
        return Books.read(Path(name) / "a", began)


def waiting(delay: float) -> tuple[float, float]:
    """Two launchers, of which the second comes late: for how long the first idled, and how late the second was."""
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
    """When a launcher first wrote such a line into its timeline."""
    lines = map(json.loads, (run_dir / "timeline.jsonl").read_text().splitlines())
    return float(next(line["t"] for line in lines if line["kind"] == kind))


def hanging() -> tuple[Books, float]:
    """Two ranks, of which one stops; and for how long both together got nowhere until the launcher says so: the one
    from the beginning of its step, the other from the moment when it waits."""
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        folder, began = Path(name), time.time()
        finish(start(folder, "a", ["--nproc-per-node", "2"], ["detection"]))
        failed = _line(folder / "a", "failure")
        return Books.read(folder / "a", began), sum(failed - _moment(folder / "a" / note) for note in NOWHERE)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round measured: rises in hundredths of the delay, and gaps."""

    own: Mapping[str, float]
    others: Mapping[str, float]
    gaps: Sequence[float]


def once_each(causes: Sequence[Sequence[str]]) -> Round:
    """One run without and one with each delay, in random order."""
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
    """Seconds by which this cause's time is longer, by another clock than the books'."""
    return books.clocked[cause] - usual.clocked[cause] if cause in books.clocked else DELAY


def main() -> int:
    """All rows."""
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
    """Booked seconds in hundredths of the true ones; judged by how far the median is off."""
    off = abs(statistics.median(values) - 100) <= 100 * TIGHT
    row = bench.measured("recovery-10", f"{what}: booked on its cause, % of it", values, "%")
    return bench.Measurement(**{**vars(row), "target": "100 ± 5", "held": off})


if __name__ == "__main__":
    sys.exit(main())
