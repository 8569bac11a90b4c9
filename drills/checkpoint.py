"""Checkpoints under faults: corrupt bytes, processes killed while they save, interruptions, touch files, bad disks,
and random orders of all operations on the tiers.

Each row reports what was lost and whether the rule held; `kept by` names the test that checks the same at each
change. Trials of kills are kept by code in out/drill/checkpoint.jsonl, so a run that was stopped continues from
there.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import _bench as bench  # noqa: E402
from _saving import damage, explore, places, resume, touch  # noqa: E402
from _saving.kills import WEIGHTS, Trial, hash_equal, killer  # noqa: E402

OUT = ROOT / "out" / "drill"
NAME = "checkpoint"
WIDTH = 10_000  # of the script's model: 15 MB of state, 10 with half of it frozen
TOUCHED_WIDTH = 65_536  # 100 MB
SEED = 20261122
TESTS = "tests/holdfast/"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One line of the table."""

    bar: str
    drill: str
    n: int
    resumed_s: float | None = None
    resumed_p90_s: float | None = None
    steps_lost: int | None = None
    hash_equal: bool | None = None
    held: bool | None = None
    kept_by: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The number of trials of each drill."""

    seed: int
    trials: int
    damages: int
    cuts: int
    touches: int
    width: int
    first: int
    traces: int | None
    until: float

    @property
    def enough(self) -> bool:
        """Return whether no further trial begins."""
        return time.monotonic() >= self.until


class Kept:
    """Trials and rows of this code, one per line; with other code they start again."""

    def __init__(self, path: Path) -> None:
        self._path, self._code = path, bench.code()
        self.trials: dict[tuple[int, int], Trial] = {}
        self.rows: dict[str, list[Measurement]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if entry.get("code") == self._code:
                self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        if "trial" in entry:
            trial = Trial(**entry["trial"])
            self.trials[entry["seed"], trial.number] = trial
        else:
            self.rows[entry["name"]] = [Measurement(**one) for one in entry["rows"]]

    def keep(self, **entry: Any) -> None:
        """Add a line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"code": self._code, **entry}) + "\n")
        self._take(entry)

    def of(self, seed: int) -> list[Trial]:
        """Return the trials of one series."""
        return [trial for (which, _), trial in sorted(self.trials.items()) if which == seed]


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S}  {text}", file=sys.stderr, flush=True)


# The drills


def damages(folder: Path, effort: Effort, kept: Kept) -> list[Measurement]:
    """Return the rows of checkpoint-8."""
    logging.getLogger("holdfast.checkpoint").setLevel(logging.CRITICAL)  # each corruption is logged, as expected
    failures = damage.drill(folder, seed=effort.seed, trials=effort.damages)
    logging.getLogger("holdfast.checkpoint").setLevel(logging.NOTSET)
    what = f"newest checkpoint corrupt: {', '.join(damage.DAMAGES)}"
    return [
        verdict(
            "checkpoint-8",
            what,
            effort.damages,
            failures,
            kept_by="checkpoint/restore/test_damage.py",
            hash_equal=not failures,
        )
    ]


def kills(folder: Path, effort: Effort, kept: Kept) -> list[Measurement]:
    """Return the rows of checkpoint-9."""
    done = {trial.number for trial in kept.of(effort.seed)}
    missing = [number for number in range(effort.trials) if number not in done]
    if missing and not effort.enough:
        with killer(folder, seed=effort.seed, width=effort.width) as hurting:
            for number in missing:
                if effort.enough:
                    break
                trial = hurting.trial(number)
                kept.keep(seed=effort.seed, trial=asdict(trial))
                say_trial(trial, effort.trials)
    return kill_rows([trial for trial in kept.of(effort.seed) if trial.number < effort.trials], effort.trials)


def say_trial(trial: Trial, wanted: int) -> None:
    for failure in trial.failures:
        say(f"  trial {trial.number}: {trial.kind}: {failure}")
    if trial.number % 20 == 19:
        say(f"  kill {trial.number + 1} of {wanted}")


def kill_rows(trials: Sequence[Trial], wanted: int) -> list[Measurement]:
    """Return a row for each kind of kill, and one for all."""
    groups = [(str(kind), [trial for trial in trials if trial.kind == str(kind)]) for kind in WEIGHTS]
    rows = [kill_row(what, found) for what, found in groups if found]
    return [*rows, kill_row(f"all kills while training and saving, of {wanted}", trials)]


def kill_row(what: str, trials: Sequence[Trial]) -> Measurement:
    failures = [f"trial {trial.number}: {failure}" for trial in trials for failure in trial.failures]
    resumed = [trial.resumed for trial in trials if trial.resumed is not None]
    lost = [trial.lost for trial in trials]
    if not trials:
        return Measurement(bar="checkpoint-9", drill=what, n=0, note="none was made")
    note = f"steps made again: {sum(lost)} in all, median {bench.median(lost):g}, p90 {bench.quantile(lost, 0.9):g}"
    return verdict(
        "checkpoint-9",
        what,
        len(trials),
        failures,
        resumed_s=bench.quantile(resumed, 0.5) if resumed else None,
        resumed_p90_s=bench.quantile(resumed, 0.9) if resumed else None,
        steps_lost=max(lost),
        hash_equal=all(trial.hash_equal for trial in trials),
        kept_by="checkpoint/test_drill.py",
        note=note,
    )


def resumes(folder: Path, effort: Effort, kept: Kept) -> list[Measurement]:
    """Return the rows of checkpoint-10."""
    cuts, failures = resume.bits(folder / "bits", seed=effort.seed, cuts=effort.cuts, steps=15 * effort.cuts)
    struck, memory = resume.replaced(folder / "memory", seed=effort.seed, cuts=effort.cuts, steps=15 * effort.cuts)
    worlds = (2, 3, 1, 4) if effort.cuts > 1 else (2, 1)
    others = resume.sizes(folder / "sizes", worlds, each=4)
    return [
        verdict(
            "checkpoint-10",
            "two ranks cut at random and resumed: weights, moments, generators of each rank, against no cut",
            cuts,
            failures,
            hash_equal=not failures,
            kept_by="training/test_job_restore.py",
        ),
        verdict(
            "checkpoint-10",
            "one of two ranks SIGKILLed and replaced from the other's memory: the same, against no kill",
            struck,
            memory,
            hash_equal=not memory,
            kept_by="training/recovery/test_random_numbers.py",
        ),
        verdict(
            "checkpoint-10",
            f"resumed with {', '.join(map(str, worlds))} ranks: samples of each step, against two ranks",
            len(worlds),
            others,
            hash_equal=not others,
            kept_by="training/test_worlds.py",
        ),
    ]


def touches(folder: Path, effort: Effort, kept: Kept) -> list[Measurement]:
    """Return the rows of checkpoint-11."""
    width = TOUCHED_WIDTH if effort.touches >= 20 else effort.width
    found = touch.drill(folder, seed=effort.seed, times=effort.touches, width=width)
    seconds = [one.seconds for one in found.found]
    parts = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    spread = ", ".join(f"{name} {bench.quantile(seconds, at):.3f}" for name, at in parts.items())
    step = bench.median([one.step for one in found.found])
    bound = bench.median([found.bound(one) for one in found.found])
    note = (
        f"{spread} s; {len(found.late)} over their bound, {bound:.3f} s = step {step:.3f} s + {touch.DISK_FACTOR} x "
        f"{found.disk:.3f} s of disk for {found.nbytes / 1e6:.0f} MB + {touch.SPARE_SECONDS} s"
    )
    row = verdict(
        "checkpoint-11",
        f"touch-file to a durable checkpoint of {found.nbytes / 1e6:.0f} MB by two ranks",
        len(seconds),
        [*found.failures, *(f"{late:.3f} s is over the bound" for late in found.late)],
        kept_by="launcher/membership/test_attempt_end.py",
        note=note,
    )
    return [row]


def bad_places(folder: Path, effort: Effort, kept: Kept) -> list[Measurement]:
    """Return the rows of real environments."""
    kept_by = {
        "disk full in the middle of saves": "checkpoint/io/test_full_disk.py",
        "file system turned read-only": "checkpoint/io/test_full_disk.py",
        "file system without O_DIRECT": "checkpoint/io/test_direct_writer.py",
    }
    return [
        place(what, folder / str(number), drill, kept_by.get(what, ""))
        for number, (what, drill) in enumerate(places.DRILLS.items())
    ]


def place(what: str, folder: Path, drill: Callable[[Path], places.Outcome], kept_by: str) -> Measurement:
    try:
        outcome = drill(folder)
    except places.CannotError as error:
        return Measurement(bar="environment", drill=what, n=0, kept_by=kept_by, note=f"not done: {error}")
    return verdict(
        "environment",
        what,
        1,
        outcome.failures,
        steps_lost=outcome.lost,
        hash_equal=hash_equal(outcome.failures),
        kept_by=kept_by,
        note=f"the user reads: {outcome.told}" if outcome.told else "",
    )


def explores(folder: Path, effort: Effort, kept: Kept) -> list[Measurement]:
    """Return the row of random orders of saves, uploads, retention, restores, outages and corruption."""
    explored = explore.drill(seed=effort.seed, first=effort.first, traces=effort.traces, until=effort.until, say=say)
    failures = [] if explored.found is None else [explored.found.message]
    what = "random orders of saves, uploads, retention, restores, outages and corruption on all tiers"
    return [verdict("tiers", what, explored.traces, failures, kept_by="model/test_tiers.py", note=str(explored))]


def verdict(bar: str, drill: str, n: int, failures: Sequence[str], *, note: str = "", **more: Any) -> Measurement:
    """Return a row whose `held` is computed; it contains the first failures."""
    told = "; ".join([*([note] if note else []), *failures[:5]])
    return Measurement(bar=bar, drill=drill, n=n, held=n > 0 and not failures, note=told, **more)


def elsewhere() -> Iterator[Measurement]:
    """Yield the rows of tests that no drill repeats. A missing test is a row that does not hold."""
    told = {
        "killed at each system call by which a save changes the disk": (
            "checkpoint/saving/test_crash.py",
            "test_a_kill_at_any_system_call_leaves_a_whole_commit",
        ),
        "writes, fsyncs and renames in a safe order (traced)": (
            "checkpoint/saving/test_crash.py",
            "test_writes_fsyncs_and_renames_are_in_crash_safe_order",
        ),
        "S3: the connection cut at each request of an upload": (
            "checkpoint/stores/test_s3_faults.py",
            "test_interrupted_upload_is_absent_or_complete_and_retryable",
        ),
        "disk full at each write of a save": (
            "checkpoint/io/test_full_disk.py",
            "test_no_space_at_any_point_never_leaves_half_a_commit",
        ),
    }
    for what, (file, name) in told.items():
        there = (ROOT / TESTS / file).exists() and f"def {name}(" in (ROOT / TESTS / file).read_text()
        yield Measurement(bar="test", drill=what, n=0, held=None if there else False, kept_by=file)


DRILLS: dict[str, Callable[[Path, Effort, Kept], list[Measurement]]] = {
    "damage": damages,
    "kills": kills,
    "resume": resumes,
    "touch": touches,
    "places": bad_places,
    "explore": explores,
}


# The table


def table(rows: Sequence[Measurement]) -> str:
    head = ["bar", "drill", "n", "resumed s", "p90", "steps lost", "equal", "held", "kept by"]
    lines = [head, *([*map(_cell, _values(one))] for one in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    text = "\n".join(f"| {' | '.join(line)} |" for line in padded)
    return "\n".join([text, "", *(f"- {one.drill}: {one.note}" for one in rows if one.note)])


def _values(one: Measurement) -> list[Any]:
    seconds = [math.nan if value is None else value for value in (one.resumed_s, one.resumed_p90_s)]
    judged = [one.steps_lost, one.hash_equal, one.held]
    return [one.bar, one.drill, one.n or None, *seconds, *judged, one.kept_by or None]


def _cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "NO", None: "—"}[value]
    return bench.number(value) if isinstance(value, float) else str(value)


# The command line


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which drills (all): {', '.join(DRILLS)}")
    parser.add_argument("--trials", type=int, help="how many kills, those that are kept included (40)")
    parser.add_argument("--damages", type=int, help="how many checkpoints are corrupted (300)")
    parser.add_argument("--seed", type=int, default=SEED, help="of all that is random")
    parser.add_argument("--traces", type=int, help="how many traces are explored (2,000; with --seconds no limit)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first trace of the seed to explore")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no further kill or trace after so long"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where trials, JSON and work go")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quick", action="store_true", help="a little of each drill, whatever was kept")
    group.add_argument("--full", action="store_true", help="1,000 kills")
    found = parser.parse_args()
    unknown = set(found.names) - set(DRILLS)
    if unknown:
        parser.error(f"no such drill: {', '.join(sorted(unknown))}")
    return found


def effort_of(asked: argparse.Namespace) -> Effort:
    quick = asked.quick
    return Effort(
        seed=asked.seed,
        trials=asked.trials or (4 if quick else 1000 if asked.full else 40),
        damages=asked.damages or (24 if quick else 300),
        cuts=1 if quick else 4,
        touches=5 if quick else 100,
        width=1000 if quick else WIDTH,
        first=asked.first,
        traces=asked.traces
        or (None if asked.seconds < math.inf else 50 if quick else 20_000 if asked.full else 2_000),
        until=time.monotonic() + asked.seconds,
    )


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(130))
    asked = arguments()
    effort = effort_of(asked)
    out: Path = asked.out
    trials = out / (f"{NAME}.quick.jsonl" if asked.quick else f"{NAME}.jsonl")
    if asked.quick:
        trials.unlink(missing_ok=True)
    kept = Kept(trials)
    for name in asked.names or DRILLS:
        say(name)
        with workplace(out / f"{NAME}.work" / name) as folder:
            rows = DRILLS[name](folder, effort, kept)
        kept.keep(name=name, rows=[asdict(row) for row in rows])
    return finish(out, kept, asked.names, quick=asked.quick)


class workplace:  # noqa: N801  (reads like the context manager that it is)
    """A folder on the disk of the results, which is removed afterwards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Path:
        self.__exit__()
        self._folder.mkdir(parents=True)
        return self._folder

    def __exit__(self, *raised: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def finish(out: Path, kept: Kept, names: Sequence[str], *, quick: bool) -> int:
    shown = [row for name in DRILLS if not names or name in names for row in kept.rows.get(name, ())]
    rows = [*shown, *(() if names else elsewhere())]
    here, date = bench.machine(), f"{datetime.now(UTC):%Y-%m-%d}"
    document = {"name": NAME, "machine": here, "commit": bench.commit(), "date": date, "quick": quick}
    path = out / (f"{NAME}.quick.json" if quick else f"{NAME}.json")
    path.write_text(json.dumps({**document, "rows": [asdict(one) for one in rows]}, indent=1) + "\n")
    print(table(rows))
    print(f"\n{bench.describe(here)}; {date}; {path}")
    return int(any(one.held is False for one in rows))


if __name__ == "__main__":
    sys.exit(main())
