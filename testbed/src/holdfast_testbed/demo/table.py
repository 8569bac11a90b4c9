"""The table at the end: each promise, the measurement, and whether the promise was kept."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_testbed.drill.promises import Verdict

HEADINGS = ("fault", "noticed", "next step", "promised", "lost", "promised", "counted as", "held")


@dataclass(frozen=True, kw_only=True)
class Check:
    """A promise about the whole run."""

    what: str
    measured: str
    held: bool


def render(verdicts: list[Verdict], checks: list[Check]) -> str:
    """Return a text table for a terminal."""
    rows = [HEADINGS, *(_row(verdict) for verdict in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for verdict in verdicts:
        lines.extend(f"  missed: {verdict.promise.fault}: {complaint}" for complaint in verdict.complaints)
    lines.append("")
    lines.extend(f"{'yes' if check.held else 'NO':<4} {check.what}: {check.measured}" for check in checks)
    return "\n".join(lines)


def _row(verdict: Verdict) -> tuple[str, ...]:
    promise, outcome = verdict.promise, verdict.outcome
    noticed = "" if outcome.noticed_seconds is None else f"{outcome.noticed_seconds:.1f} s"
    causes = ", ".join(incident.cause for incident in outcome.incidents) or "nothing"
    return (
        promise.fault,
        noticed,
        f"{outcome.resumed_seconds:.1f} s",
        f"<= {promise.within_seconds:.0f} s",
        str(outcome.lost_steps),
        f"<= {promise.max_lost_steps}",
        f"{causes} ({len(outcome.incidents)}x)",
        "yes" if verdict.held else "NO",
    )
