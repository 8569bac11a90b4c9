"""The drill matrix on the testbed's real nodes: each fault is injected into a small job of three workers on one
cluster. It shows what was detected, resumed, lost and counted. `held` does not include times, which are listed next
to it.

Trials of the same code are kept in out/drill/trials.jsonl, so a run that was stopped continues from there.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import _bench as bench  # noqa: E402

from holdfast_testbed.cluster.cluster import Cluster  # noqa: E402
from holdfast_testbed.drill.faults import DrillJob  # noqa: E402
from holdfast_testbed.drill.install import DRILL_JOB, apply_drill_job, install_chart  # noqa: E402
from holdfast_testbed.drill.matrix import CASES, Case  # noqa: E402
from holdfast_testbed.drill.trial import WORKERS, Trial, run, settle  # noqa: E402
from holdfast_testbed.drill.watcher import Watcher  # noqa: E402
from holdfast_testbed.errors import UnplaceableError  # noqa: E402

OUT = ROOT / "out" / "drill"
NAME = "drill"
DISK_MIB = 256
QUICK = ("rank-killed", "exit-2", "sidecar-killed", "pod-evicted")


def give_small_disk(cluster: Cluster) -> None:
    """Mount a disk that can be filled over the checkpoints of all namespaces. Nodes use it after a reboot."""
    folder = cluster.state.checkpoints
    folder.mkdir(parents=True, exist_ok=True)
    size = f"size={DISK_MIB}m,mode=777"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "holdfast-drill", str(folder)], check=True)
    for number in range(1, cluster.nodes + 1):
        cluster.node(number).kill()
        cluster.node(number).start()
    cluster.wait_for_nodes()


@contextmanager
def stage() -> Iterator[DrillJob]:
    """Start a job of three workers that train, on its own cluster."""
    cluster = Cluster.up(name=NAME, nodes=WORKERS, replace=True)
    try:
        give_small_disk(cluster)
        install_chart(cluster)
        cluster.prepare_namespace(NAME)
        apply_drill_job(cluster, NAME)
        with Watcher(cluster, NAME, DRILL_JOB) as watcher:
            yield DrillJob(cluster=cluster, watcher=watcher, say=say)
    finally:
        cluster.down()


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S}  {text}", file=sys.stderr, flush=True)


class Kept:
    """Trials by case, one per line; with other code they start again."""

    def __init__(self, path: Path) -> None:
        self._path, self._code = path, bench.code()
        self.trials: dict[str, list[Trial]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if entry.pop("code", None) == self._code:
                self._add(Trial(**entry))

    def _add(self, trial: Trial) -> None:
        self.trials.setdefault(trial.case, []).append(trial)

    def keep(self, trial: Trial) -> None:
        self._add(trial)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"code": self._code, **trial.to_json()}) + "\n")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One line of the table."""

    fault: str
    n: int
    detected_s: float | None
    resumed_s: float | None
    resumed_p90_s: float | None
    steps_lost: int
    samples_wrong: int
    restarts_counted: str
    hash_equal: bool | None
    held: bool | None
    note: str = ""


def measured(case: Case, trials: Sequence[Trial]) -> Measurement:
    resumed = [trial.resumed for trial in trials if trial.resumed is not None]
    detected = [trial.detected for trial in trials if trial.detected is not None]
    counted = sorted({_words(trial.counted) for trial in trials})
    return Measurement(
        fault=case.fault,
        n=len(trials),
        detected_s=bench.quantile(detected, 0.5) if detected else None,
        resumed_s=bench.quantile(resumed, 0.5) if resumed else None,
        resumed_p90_s=bench.quantile(resumed, 0.9) if resumed else None,
        steps_lost=max(trial.lost for trial in trials),
        samples_wrong=sum(trial.wrong for trial in trials),
        restarts_counted=" / ".join(counted),
        hash_equal=all(trial.equal for trial in trials),
        held=all(trial.held(case) for trial in trials),
        note="; ".join(sorted({trial.complaint for trial in trials if trial.complaint})),
    )


def skipped(case: Case, why: str) -> Measurement:
    nothing = dict.fromkeys(("detected_s", "resumed_s", "resumed_p90_s", "hash_equal", "held"))
    return Measurement(
        fault=case.fault, n=0, steps_lost=0, samples_wrong=0, restarts_counted="—", note=why, **nothing
    )


def _words(counted: Any) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in sorted(counted.items())) or "none"


def table(rows: Sequence[Measurement]) -> str:
    head = ["fault", "n", "detected s", "resumed s", "p90", "steps lost", "samples wrong", "counted", "equal", "held"]
    lines = [head, *([*map(_cell, _values(one))] for one in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    text = "\n".join(f"| {' | '.join(line)} |" for line in padded)
    return "\n".join([text, *(f"{one.fault}: {one.note}" for one in rows if one.note)])


def _values(one: Measurement) -> list[Any]:
    seconds = [one.detected_s, one.resumed_s, one.resumed_p90_s]
    figures = [math.nan if value is None else value for value in seconds]
    seen = [one.steps_lost, one.samples_wrong] if one.n else [None, None]
    rest = [*seen, one.restarts_counted, one.hash_equal, one.held]
    return [one.fault, one.n, *figures, *rest]


def _cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "NO", None: "—"}[value]
    return bench.number(value) if isinstance(value, float) else str(value)


def arguments(known: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which faults (all): {', '.join(known)}")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no further trial after so long; 0 shows what is kept"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quick", action="store_true", help=f"one trial of {', '.join(QUICK)}, whatever was kept")
    group.add_argument("--full", action="store_true", help="ten trials of each")
    found = parser.parse_args()
    unknown = set(found.names) - set(known)
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    return found


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(130))
    every = {case.name: case for case in CASES}
    asked = arguments(list(every))
    chosen = [every[name] for name in asked.names or (QUICK if asked.quick else every)]
    kept = Kept(OUT / ("quick.jsonl" if asked.quick else "trials.jsonl"))
    wanted = 10 if asked.full else 1
    if asked.quick:
        kept.trials.clear()
    notes: dict[str, str] = {}
    if asked.seconds and any(len(kept.trials.get(case.name, ())) < wanted for case in chosen):
        until = time.monotonic() + asked.seconds
        with stage() as where:
            settle(where)
            for case in [case for _ in range(wanted) for case in chosen]:
                if time.monotonic() < until and len(kept.trials.get(case.name, ())) < wanted:
                    one_trial(case, where, kept, notes)
    return finish([*chosen] if asked.names or asked.quick else [*every.values()], kept, notes, quick=asked.quick)


def one_trial(case: Case, where: DrillJob, kept: Kept, notes: dict[str, str]) -> None:
    why = case.skip(where) if case.skip is not None else ""
    if why:
        notes[case.name] = why
        return
    say(case.fault)
    try:
        trial = run(case, where)
    except UnplaceableError as error:
        notes[case.name] = str(error)
        return
    kept.keep(trial)
    say(f"  {'held' if trial.held(case) else 'NOT HELD'}: {json.dumps(trial.to_json())}")


def finish(shown: Sequence[Case], kept: Kept, notes: dict[str, str], *, quick: bool) -> int:
    rows = [
        measured(case, kept.trials[case.name])
        if case.name in kept.trials
        else skipped(case, notes.get(case.name, "not drilled in this run"))
        for case in shown
    ]
    here, date = bench.machine(), f"{datetime.now(UTC):%Y-%m-%d}"
    document = {"name": NAME, "machine": here, "commit": bench.commit(), "date": date, "quick": quick}
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / ("matrix.quick.json" if quick else "matrix.json")
    path.write_text(json.dumps({**document, "rows": [vars(one) for one in rows]}, indent=1) + "\n")
    print(table(rows))
    print(f"\n{bench.describe(here)}; {date}; {path.relative_to(ROOT)}")
    return int(any(one.held is False for one in rows))


if __name__ == "__main__":
    sys.exit(main())
