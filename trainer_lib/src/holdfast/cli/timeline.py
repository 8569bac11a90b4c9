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
_MARKS: Final = {"failure": "×", "recovery": "o"}
_SHOWN: Final = frozenset({"start", "world", "failure", "recovery", "checkpoint", "restore", "end"})

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Story:
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


def read(path: Path) -> Story:
    """Read a timeline, with its older part if there is one."""
    older = path.with_name(f"{path.name}.1")
    try:
        text = (older.read_bytes() if older.exists() else b"") + b"\n" + path.read_bytes()
    except OSError as error:
        raise UsageError(f"holdfast timeline: {path} cannot be read: {error.strerror}") from error
    lines = [line for line in text.split(b"\n") if line.strip()]
    entries = [entry for line in lines if (entry := _entry(line)) is not None]
    return Story(entries=tuple(entries), skipped=len(lines) - len(entries))


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


def render(story: Story) -> str:
    if not story.entries:
        return f"nothing to show{_skipped(story)}"
    lines = [_heading(story)]
    lines += _strip("loss", story.loss, story)
    lines += _strip("world", story.world, story, low=0.0)
    lines += _marks(story)
    lines += [_told(story, entry) for entry in story.entries if entry["kind"] in _SHOWN]
    return "\n".join(lines)


def _heading(story: Story) -> str:
    steps = [int(entry["step"]) for entry in story.of("step") if _number(entry.get("step"))]
    began = datetime.fromtimestamp(story.began, UTC).strftime("%Y-%m-%d %H:%M:%S")
    reached = f", step {steps[0]} to {steps[-1]}" if steps else ""
    failures = len(story.of("failure"))
    told = f"{failures} failure{'' if failures == 1 else 's'}"
    return f"{began} UTC, {_length(story):.1f} s{reached}, {told}{_skipped(story)}"


def _skipped(story: Story) -> str:
    return f" ({story.skipped} unreadable lines skipped)" if story.skipped else ""


def _length(story: Story) -> float:
    return max(story.after(entry) for entry in story.entries)


def _column(moment: float, length: float) -> int:
    return min(_WIDTH - 1, int(_WIDTH * moment / length)) if length > 0 else 0


def _strip(name: str, series: Sequence[tuple[float, float]], story: Story, *, low: float = math.inf) -> list[str]:
    """Return one line that shows a number over time. A column without a value repeats the last one."""
    finite = [(moment, value) for moment, value in series if math.isfinite(value)]
    if not finite:
        return []
    length = _length(story)
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


def _marks(story: Story) -> list[str]:
    cells = [" "] * _WIDTH
    for kind in ("recovery", "failure"):
        for entry in story.of(kind):
            cells[_column(story.after(entry), _length(story))] = _MARKS[kind]
    line = "".join(cells).rstrip()
    return [f"       {line:{_WIDTH}} × failure, o recovered"] if line else []


def _told(story: Story, entry: Entry) -> str:
    words = _WORDS[entry["kind"]](entry)
    return _plain(f"{story.after(entry):+10.2f} s  {entry['kind']:<10} {words}".rstrip())


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
    told = f"step {entry.get('step')}" + (stores and f" from {stores}") + (lost and f"; lost: {lost}")
    return told + (inexact and f"; {inexact}")


def _recovery(entry: Entry) -> str:
    phases = _phases(entry)
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    return f"{sum(phases.values()):.2f} s after the last step ({parts}), at step {entry.get('step')}"


def _phases(entry: Entry) -> dict[str, float]:
    phases = entry.get("phases")
    return {str(k): float(v) for k, v in phases.items() if _number(v)} if isinstance(phases, dict) else {}


_WORDS: Final[dict[str, Callable[[Entry], str]]] = {
    "start": lambda entry: str(entry.get("pod") or ""),
    "world": lambda entry: (
        f"{entry.get('generation')}.{entry.get('attempt')}: {entry.get('workers')} workers ({entry.get('change')})"
    ),
    "failure": _failure,
    "recovery": _recovery,
    "checkpoint": _checkpoint,
    "restore": _restore,
    "end": lambda entry: f"{entry.get('reason')} ({entry.get('code')})",
}


def draw(story: Story, output: Path) -> None:
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
    loss.plot(*_columns(story.loss), linewidth=1.2)
    loss.set_ylabel("loss")
    world.step(*_columns(story.world), where="post")
    world.set_ylabel("ranks")
    world.set_ylim(0, 0.5 + max((size for _, size in story.world), default=0.5))
    world.yaxis.get_major_locator().set_params(integer=True)
    world.set_xlabel("seconds")
    _mark(story, loss, label=True)
    _mark(story, world, label=False)
    if story.of("failure") or story.of("recovery"):
        loss.legend(loc="upper right")
    loss.set_title(_heading(story) if story.entries else render(story))
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise UsageError(f"holdfast timeline: {output} cannot be drawn: {error}") from error


def _columns(series: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [moment for moment, _ in series], [value for _, value in series]


def _mark(story: Story, axes: Axes, *, label: bool) -> None:
    for number, entry in enumerate(story.of("recovery")):
        end = story.after(entry)
        begin = end - sum(_phases(entry).values())
        axes.axvspan(begin, end, color="tab:orange", alpha=0.3, label=_once("recovery", number, label=label))
    for number, entry in enumerate(story.of("failure")):
        moment = story.after(entry)
        axes.axvline(moment, color="tab:red", linewidth=1, label=_once("failure", number, label=label))


def _once(text: str, number: int, *, label: bool) -> str | None:
    return text if label and number == 0 else None


def main(words: Iterable[str]) -> int:
    """Run the command. Return its exit code."""
    parser = Parser(prog="holdfast timeline", description="Show the events of a run.", allow_abbrev=False)
    parser.add_argument("file", type=Path, metavar="FILE", help="the file that 'holdfast run --timeline FILE' wrote")
    parser.add_argument(
        "--output", type=Path, metavar="PICTURE", help="draw a picture (.png, .svg, .pdf) instead of text"
    )
    known = parser.parse_args(list(words))
    story = read(known.file)
    if known.output is None:
        print(render(story))
        return 0
    draw(story, known.output)
    print(f"{known.output}: {len(story.entries)} lines drawn{_skipped(story)}")
    return 0
