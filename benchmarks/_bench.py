"""Common parts of benchmarks: interleaved trials, measurements with a spread and a target, one table, one JSON file.

A benchmark passes `Measurement`s to `finish`. Contestants of a comparison run interleaved, in random order in each
round, after a warm-up round. A ratio is computed within a round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import operator
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "bench"
_CODE = ("operator/src", "sidecar/src", "trainer_lib/src", "testbed/src", "charts", "crds", "benchmarks", "drills")
_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One line of a benchmark. `held` is computed from `ours` and `target`."""

    bar: str
    what: str
    ours: float
    unit: str
    n: int
    p10: float
    p90: float
    peer: float | None = None
    peer_name: str = ""
    limit: float | None = None
    target: str = ""
    held: bool | None = None


def measured(
    bar: str,
    what: str,
    values: Sequence[float],
    unit: str,
    *,
    target: str = "",
    at: float = 0.5,
    peer: float | None = None,
    peer_name: str = "",
    limit: float | None = None,
) -> Measurement:
    """Return a measurement: the `at` quantile of the values (the median unless the target names another)."""
    ours = quantile(values, at)
    return Measurement(
        bar=bar,
        what=what,
        ours=ours,
        unit=unit,
        n=len(values),
        p10=quantile(values, 0.1),
        p90=quantile(values, 0.9),
        peer=peer,
        peer_name=peer_name,
        limit=limit,
        target=target,
        held=meets(ours, target),
    )


def not_measured(bar: str, what: str, why: str) -> Measurement:
    """Return a line without a figure, with the reason."""
    return Measurement(bar=bar, what=what, ours=math.nan, unit="", n=0, p10=math.nan, p90=math.nan, peer_name=why)


def quantile(values: Sequence[float], at: float) -> float:
    """Return the nearest-rank quantile, so that a p99 is a value that occurred."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(at * 1000) * len(ordered) // 1000) - 1))]


def meets(value: float, target: str) -> bool | None:
    """Return whether the value meets a target like `<= 60`; None without one."""
    if not target:
        return None
    sign, _, bound = target.partition(" ")
    return bool(_COMPARE[sign](value, float(bound)))


def interleaved(
    contestants: Mapping[str, Callable[[], float]], rounds: int, *, rng: random.Random | None = None
) -> dict[str, list[float]]:
    """Return the values of each contestant, one per round, in random order, after a warm-up round that is dropped."""
    rng = rng or random.Random()  # noqa: S311 - an order, not a secret
    values: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name in rng.sample(sorted(contestants), len(contestants)):
            value = contestants[name]()
            if number:
                values[name].append(value)
    return values


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return our values over theirs, round by round."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The size of a run: `quick` for CI, whose figures are not judged, `full` without a limit, else ten minutes."""

    quick: bool
    full: bool
    flags: frozenset[str] = frozenset()

    def pick(self, *, quick: int, default: int, full: int) -> int:
        """Return the number of trials."""
        return quick if self.quick else full if self.full else default


class Trials:
    """Values by key. With `full`, each is appended to a file at once, and a later run continues from there."""

    def __init__(self, name: str, effort: Effort) -> None:
        self._path = OUT / f"{name}.trials.jsonl" if effort.full else None
        self._code = code()
        self._kept: dict[str, list[float]] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                entry = json.loads(line)
                if entry.get("code") == self._code:
                    self._kept.setdefault(entry["key"], []).append(entry["value"])

    def collect(self, key: str, wanted: int, trial: Callable[[], float]) -> list[float]:
        """Return the key's values, after as many further trials as are missing."""
        kept = self._kept.setdefault(key, [])
        while len(kept) < wanted:
            self.keep(key, trial())
            _progress(f"{key}: {len(kept)} of {wanted}")
        _progress("")
        return kept

    def values(self, key: str) -> list[float]:
        """Return the present values of a key."""
        return self._kept.get(key, [])

    def keep(self, key: str, value: float) -> None:
        """Add one value."""
        self._kept.setdefault(key, []).append(value)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"code": self._code, "key": key, "value": value}) + "\n")


def arguments(description: str, flags: Mapping[str, str] | None = None) -> Effort:
    """Parse the command line that all benchmarks share, with further flags and their help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (flags or {}).items():
        parser.add_argument(name, dest="flags", action="append_const", const=name, default=[], help=text)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quick", action="store_true", help="a minute or two; its figures are not judged")
    group.add_argument("--full", action="store_true", help="as long as it takes; continues where it was stopped")
    found = parser.parse_args()
    own = frozenset(found.flags) if flags else frozenset[str]()
    return Effort(quick=found.quick, full=found.full, flags=own)


def finish(name: str, rows: Sequence[Measurement], effort: Effort) -> int:
    """Print the table and write `out/bench/NAME.json`. The exit status is 1 if a judged bar was missed."""
    OUT.mkdir(parents=True, exist_ok=True)
    here = machine()
    document = {
        "name": name,
        "machine": here,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "quick": effort.quick,
        "rows": [_plain(one) for one in rows],
    }
    path = OUT / (f"{name}.quick.json" if effort.quick else f"{name}.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))
    print(f"\n{describe(here)}; {document['date']}; {path.relative_to(ROOT)}")
    if effort.quick:
        print("--quick: the figures are not judged")
        return 0
    return int(any(one.held is False for one in rows))


def _plain(one: Measurement) -> dict[str, Any]:
    """Return a row for JSON, in which a missing figure is null."""
    fields = asdict(one)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def table(rows: Sequence[Measurement]) -> str:
    """Return an aligned Markdown table."""
    head = ["bar", "what", "ours", "p10–p90", "peer", "limit", "target", "held", "n"]
    lines = [head, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _cells(one: Measurement) -> list[str]:
    return [
        one.bar,
        one.what,
        f"{number(one.ours)} {one.unit}",
        f"{number(one.p10)}–{number(one.p90)}" if one.n else "—",
        (one.peer_name or "—") if one.peer is None else f"{number(one.peer)} ({one.peer_name})",
        "—" if one.limit is None else number(one.limit),
        one.target or "—",
        {True: "yes", False: "NO", None: "—"}[one.held],
        str(one.n),
    ]


def number(value: float) -> str:
    """Return the number with three significant digits."""
    if math.isnan(value):
        return "—"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """Return the machine on which the benchmark runs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(memory),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch,
    }


def describe(found: Mapping[str, Any]) -> str:
    """Return the machine in a few words."""
    return f"{found['cpus']} cores, {found['memory_gib']} GiB, Linux {found['kernel']}, Python {found['python']}"


def commit() -> str:
    """Return the checked-out commit, with a mark when files differ from it."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return (found.stdout.strip() or "unknown") + ("+" if dirty.stdout.strip() else "")


def code() -> str:
    """Return the ID of the checked-out code without its docs and tests, with a mark when files differ from it.

    A long run is kept by this ID, so that a commit which changes neither loses no trial.
    """
    git = ["git", "-C", str(ROOT)]
    trees = [*git, "rev-parse", *(f"HEAD:{part}" for part in _CODE)]
    dirty = [*git, "status", "--porcelain", "-uno", "--", *_CODE]
    found, changed = (subprocess.run(asked, capture_output=True, text=True, check=False) for asked in (trees, dirty))
    if found.returncode:
        return "unknown"
    return hashlib.sha256(found.stdout.encode()).hexdigest()[:12] + ("+" if changed.stdout.strip() else "")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def bound(ratios: Sequence[float]) -> float:
    """Return the upper end of the mean ratio's 95 % interval (two standard errors of the logarithms)."""
    logs = [math.log(ratio) for ratio in ratios]
    spread = 2 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(statistics.fmean(logs) + spread)
