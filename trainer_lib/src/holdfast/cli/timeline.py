"""`holdfast timeline FILE`: shows a timeline in the terminal or as a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.cli.support.arguments import Parser
from holdfast.core.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 72
_SYMBOLS: Final = {"failure": "×", "recovery": "o"}

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The readable lines of a timeline in order, and the number of unreadable ones."""

    entries: tuple[Entry, ...]
    skipped: int = 0

    @property
    def began(self) -> float:
        """Unix time of the first line."""
        return min((float(entry["t"]) for entry in self.entries), default=0.0)

    def of(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry["kind"] == kind]

    def after(self, entry: Entry) -> float:
        """Return the seconds from the first line to this one."""
        return float(entry["t"]) - self.began

    def series(self, kind: str, name: str) -> list[tuple[float, float]]:
        """Return a number over time. Lines without it are skipped."""
        return [(self.after(entry), float(entry[name])) for entry in self.of(kind) if _number(entry.get(name))]

    @property
    def loss(self) -> list[tuple[float, float]]:
        return self.series("step", "loss")

    @property
    def world(self) -> list[tuple[float, float]]:
        """The number of ranks that trained together over time; the number of workers where no step reports it."""
        return self.series("step", "worldSize") or self.series("world", "workers")


def read(path: Path) -> Recording:
    """Read a timeline, with its older part if there is one."""
    older = path.with_name(f"{path.name}.1")
    try:
        text = (older.read_bytes() if older.exists() else b"") + b"\n" + path.read_bytes()
    except OSError as error:
        raise UsageError(f"holdfast timeline: {path} cannot be read: {error.strerror}") from error
    lines = [line for line in text.split(b"\n") if line.strip()]
    entries = [entry for line in lines if (entry := _entry(line)) is not None]
    return Recording(entries=tuple(entries), skipped=len(lines) - len(entries))


def _entry(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str) or not _number(entry.get("t")):
        return None
    return entry


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def render(recording: Recording) -> str:
    if not recording.entries:
        return f"nothing to show{_skipped(recording)}"
    lines = [_heading(recording)]
    lines += _strip("loss", recording.loss, recording)
    lines += _strip("world", recording.world, recording, low=0.0)
    lines += _annotations(recording)
    lines += [_sentence(recording, entry) for entry in recording.entries if entry["kind"] in _SENTENCES]
    return "\n".join(lines)


def _heading(recording: Recording) -> str:
    steps = [int(entry["step"]) for entry in recording.of("step") if _number(entry.get("step"))]
    began = datetime.fromtimestamp(recording.began, UTC).strftime("%Y-%m-%d %H:%M:%S")
    reached = f", step {steps[0]} to {steps[-1]}" if steps else ""
    failures = len(recording.of("failure"))
    text = f"{failures} failure{'' if failures == 1 else 's'}"
    return f"{began} UTC, {_length(recording):.1f} s{reached}, {text}{_skipped(recording)}"


def _skipped(recording: Recording) -> str:
    return f" ({recording.skipped} unreadable lines skipped)" if recording.skipped else ""


def _length(recording: Recording) -> float:
    return max(recording.after(entry) for entry in recording.entries)


def _column(moment: float, length: float) -> int:
    return min(_WIDTH - 1, int(_WIDTH * moment / length)) if length > 0 else 0


def _strip(
    name: str, series: Sequence[tuple[float, float]], recording: Recording, *, low: float = math.inf
) -> list[str]:
    """Return one line that shows a number over time. A column without a value repeats the last one."""
    finite = [(moment, value) for moment, value in series if math.isfinite(value)]
    if not finite:
        return []
    length = _length(recording)
    values = [value for _, value in finite]
    low, high = min(low, *values), max(values)
    columns = {_column(moment, length): value for moment, value in finite}
    cells, last = "", None
    for column in range(_WIDTH):
        last = columns.get(column, last)
        cells += " " if last is None else _bar(last, low, high)
    return [f"{name:>6} {cells} {finite[0][1]:.4g} → {finite[-1][1]:.4g}"]


def _bar(value: float, low: float, high: float) -> str:
    share = 1.0 if high == low else (value - low) / (high - low)
    return _BARS[round(share * (len(_BARS) - 1))]


def _annotations(recording: Recording) -> list[str]:
    cells = [" "] * _WIDTH
    for kind in ("recovery", "failure"):
        for entry in recording.of(kind):
            cells[_column(recording.after(entry), _length(recording))] = _SYMBOLS[kind]
    line = "".join(cells).rstrip()
    return [f"       {line:{_WIDTH}} × failure, o recovered"] if line else []


def _sentence(recording: Recording, entry: Entry) -> str:
    sentence = _SENTENCES[entry["kind"]](entry)
    return _plain(f"{recording.after(entry):+10.2f} s  {entry['kind']:<10} {sentence}".rstrip())


def _plain(text: str) -> str:
    """Remove control characters: a script's message must not control the terminal."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)


def _failure(entry: Entry) -> str:
    return f"{entry.get('cause')} {entry.get('reason')}: {entry.get('message')}"


def _checkpoint(entry: Entry) -> str:
    cause = f" ({entry['cause']})" if entry.get("cause") else ""
    return f"step {entry.get('step')} {entry.get('tier')}: {entry.get('result')}{cause}"


def _restore(entry: Entry) -> str:
    stores, lost = (", ".join(map(str, entry.get(name) or ())) for name in ("stores", "lost"))
    inexact = str(entry.get("inexact") or "")
    text = f"step {entry.get('step')}" + (stores and f" from {stores}") + (lost and f"; lost: {lost}")
    return text + (inexact and f"; {inexact}")


def _divergence(entry: Entry) -> str:
    ranks = entry.get("ranks")
    numbers = ", ".join(map(str, ranks)) if isinstance(ranks, list) else "?"
    outcome = "repaired" if entry.get("repaired") else "no state has a majority"
    return f"step {entry.get('step')}: rank {numbers} differs, first in {entry.get('tensor')}; {outcome}"


def _slow(entry: Entry) -> str:
    ranks = [
        f"rank {one.get('rank')} ({one.get('seconds')} s per step, median {one.get('medianSeconds')} s)"
        for one in entry.get("ranks") or ()
    ]
    return ", ".join(ranks) or "no rank any more"


def _recovery(entry: Entry) -> str:
    phases = _phases(entry)
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    return f"{sum(phases.values()):.2f} s after the last step ({parts}), at step {entry.get('step')}"


def _phases(entry: Entry) -> dict[str, float]:
    phases = entry.get("phases")
    return {str(k): float(v) for k, v in phases.items() if _number(v)} if isinstance(phases, dict) else {}


def _named(samples: Sequence[Entry]) -> str:
    return ", ".join(f"sample {one.get('sample')} (rank {one.get('rank')}, {one.get('error')})" for one in samples)


def _out_of_memory(entry: Entry) -> str:
    micro_batch = entry.get("microBatch")
    how = f"micro-batches of size {micro_batch}" if micro_batch else "empty caches"
    return f"rank {entry.get('rank')} after step {entry.get('step')}; the step is repeated with {how}"


_SENTENCES: Final[dict[str, Callable[[Entry], str]]] = {
    "start": lambda entry: str(entry.get("pod") or ""),
    "world": lambda entry: (
        f"{entry.get('generation')}.{entry.get('attempt')}: {entry.get('workers')} workers ({entry.get('change')})"
    ),
    "failure": _failure,
    "recovery": _recovery,
    "checkpoint": _checkpoint,
    "restore": _restore,
    "divergence": _divergence,
    "skipped": lambda entry: (
        f"step {entry.get('step')}" + "; the learning rate is lowered" * bool(entry.get("lowered"))
    ),
    "rollback": lambda entry: f"after step {entry.get('step')}; {entry.get('samples')} samples are excluded",
    "slow": _slow,
    "spike": lambda entry: (
        f"step {entry.get('step')}; the {entry.get('quantity')} is {entry.get('value')}, usually {entry.get('usual')}"
    ),
    "unreadable": lambda entry: f"step {entry.get('step')}; cannot be read: {_named(entry.get('samples') or ())}",
    "oom": _out_of_memory,
    "end": lambda entry: f"{entry.get('reason')} ({entry.get('code')})",
}


def draw(recording: Recording, output: Path) -> None:
    """Plot loss and world size over time, with failures and recoveries, in any format that matplotlib supports."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "holdfast timeline: --output needs matplotlib: pip install 'holdfast-trainer[plot]', "
            "or leave --output out to see the timeline here"
        ) from error
    figure = Figure(figsize=(10, 5), layout="constrained")
    loss, world = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    loss.plot(*_columns(recording.loss), linewidth=1.2)
    loss.set_ylabel("loss")
    world.step(*_columns(recording.world), where="post")
    world.set_ylabel("ranks")
    world.set_ylim(0, 0.5 + max((size for _, size in recording.world), default=0.5))
    world.yaxis.get_major_locator().set_params(integer=True)
    world.set_xlabel("seconds")
    _annotate(recording, loss, label=True)
    _annotate(recording, world, label=False)
    if recording.of("failure") or recording.of("recovery"):
        loss.legend(loc="upper right")
    loss.set_title(_heading(recording) if recording.entries else render(recording))
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise UsageError(f"holdfast timeline: {output} cannot be drawn: {error}") from error


def _columns(series: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [moment for moment, _ in series], [value for _, value in series]


def _annotate(recording: Recording, axes: Axes, *, label: bool) -> None:
    for number, entry in enumerate(recording.of("recovery")):
        end = recording.after(entry)
        begin = end - sum(_phases(entry).values())
        axes.axvspan(begin, end, color="tab:orange", alpha=0.3, label=_label("recovery", number, label=label))
    for number, entry in enumerate(recording.of("failure")):
        moment = recording.after(entry)
        axes.axvline(moment, color="tab:red", linewidth=1, label=_label("failure", number, label=label))


def _label(text: str, number: int, *, label: bool) -> str | None:
    return text if label and number == 0 else None


def main(arguments: Iterable[str]) -> int:
    """Run the command. Return its exit code."""
    parser = Parser(prog="holdfast timeline", description="Show the events of a run.", allow_abbrev=False)
    parser.add_argument("file", type=Path, metavar="FILE", help="the file that 'holdfast run --timeline FILE' wrote")
    parser.add_argument(
        "--output", type=Path, metavar="PICTURE", help="draw a picture (.png, .svg, .pdf) instead of text"
    )
    known = parser.parse_args(list(arguments))
    recording = read(known.file)
    if known.output is None:
        print(render(recording))
        return 0
    draw(recording, known.output)
    print(f"{known.output}: {len(recording.entries)} lines drawn{_skipped(recording)}")
    return 0
