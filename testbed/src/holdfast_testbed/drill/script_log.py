"""The records of a drill's training script: the samples of each rank, and the completed steps with their weights.
Pure.

A step counts as completed in the highest world in which a rank records it. Its samples are those that all ranks of
that world recorded for it. A rank that is killed between the step and its record therefore does not count as a loss.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.drill.job_view import AttemptId

BEGIN, TAKE, SKIP, COMMIT, STRUCK, SAVE = "begin", "take", "skip", "commit", "struck", "save"


@dataclass(frozen=True, kw_only=True)
class Note:
    """One record. `at` is in seconds of the machine's clock, which all nodes share."""

    at: float
    do: str
    pod: str
    attempt_id: AttemptId
    step: int
    samples: tuple[int, ...] = ()
    weights: str = ""


def read(folder: Path) -> list[Note]:
    """Return all records so far, in the order of time."""
    lines = (line for file in folder.glob("notes-*.jsonl") for line in file.read_text().splitlines(keepends=True))
    return sorted((_note(line) for line in lines if line.endswith("}\n")), key=lambda note: note.at)


def _note(line: str) -> Note:
    told = json.loads(line)
    return Note(
        at=float(told["at"]),
        do=told["do"],
        pod=told["pod"],
        attempt_id=AttemptId(generation=told["attempt_id"][0], attempt=told["attempt_id"][1]),
        step=int(told["step"]),
        samples=tuple(told.get("samples", ())),
        weights=told.get("weights", ""),
    )


def clear(folder: Path) -> None:
    """Clear the records. Processes that still write append at the new end."""
    for file in folder.glob("notes-*.jsonl"):
        os.truncate(file, 0)


def whole(notes: list[Note], until: float) -> list[Note]:
    """Return the records of complete steps: not the first ones after `clear`, and none after `until`.

    After `clear`, records of some ranks are missing. Files are read one after the other while ranks write, so later
    records may be in one file and not in another. `until` is the time at which the reading began.
    """
    notes = [note for note in notes if note.at <= until]
    takes = [(note.attempt_id, note.step) for note in notes if note.do == TAKE]
    if not takes:
        return []
    attempt_id, step = min(takes)
    return [note for note in notes if note.attempt_id > attempt_id or note.step > step + 1]


def newest_attempt(notes: Iterable[Note]) -> AttemptId:
    """Return the highest world in which a step was completed."""
    return max((note.attempt_id for note in notes if note.do == COMMIT), default=AttemptId(generation=0, attempt=0))


def struck_at(notes: Iterable[Note], since: float) -> float | None:
    """Return when the script itself failed as requested."""
    return next((note.at for note in notes if note.do == STRUCK and note.at >= since), None)


def resumed_at(notes: Iterable[Note], before: AttemptId, since: float) -> float | None:
    """Return the time of the first step that a world after `before` completed."""
    return next((n.at for n in notes if n.do == COMMIT and n.attempt_id > before and n.at >= since), None)


def longest_pause(notes: Iterable[Note], since: float) -> float | None:
    """Return the longest time between two steps of a job without a restart; None without a step."""
    times = sorted(note.at for note in notes if note.do == COMMIT and note.at >= since)
    return max((later - at for at, later in itertools.pairwise([since, *times])), default=None)


def committed_steps(notes: Iterable[Note]) -> set[int]:
    """Return the steps that some rank recorded, in any world."""
    return {note.step for note in notes if note.do == COMMIT}


def skipped_steps(notes: Iterable[Note]) -> int:
    """Return the number of steps between completed ones that no rank recorded, in any world."""
    steps = committed_steps(notes)
    return max(steps) + 1 - min(steps) - len(steps) if steps else 0


def worlds(notes: Iterable[Note]) -> int:
    """Return the number of worlds, including those without a step."""
    return len({note.attempt_id for note in notes})


def lost_steps(notes: Iterable[Note]) -> int:
    """Return the number of steps that a world completed and the next one trained again, over all worlds."""
    made: dict[AttemptId, list[int]] = defaultdict(list)
    for note in notes:
        if note.do == COMMIT:
            made[note.attempt_id].append(note.step)
    in_order = [steps for _, steps in sorted(made.items())]
    return sum(max(0, max(earlier) + 1 - min(later)) for earlier, later in itertools.pairwise(in_order))


def wrong_samples(notes: Iterable[Note], *, batch: int, epoch: int) -> int:
    """Return how many samples a completed step missed, or saw twice in the step or its epoch; `epoch` is in steps.

    A sample that could not be read and was skipped counts as seen.
    """
    worlds: dict[int, AttemptId] = {}
    taken: dict[tuple[int, AttemptId], list[int]] = defaultdict(list)
    for note in notes:
        if note.do == COMMIT:
            worlds[note.step] = max(note.attempt_id, worlds.get(note.step, note.attempt_id))
        elif note.do in (TAKE, SKIP):
            taken[note.step, note.attempt_id] += note.samples
    wrong, seen = 0, defaultdict[int, list[int]](list)
    for step, attempt_id in worlds.items():
        samples = taken[step, attempt_id]
        wrong += max(0, batch - len(set(samples)))
        seen[(step - 1) // epoch] += samples
    return wrong + sum(len(samples) - len(set(samples)) for samples in seen.values())


def weights_equal(notes: Iterable[Note]) -> bool:
    """Return whether all ranks had equal weights after each step, and each world began with recorded ones."""
    noted: dict[tuple[AttemptId, int], set[str]] = defaultdict(set)
    begun: set[tuple[AttemptId, int]] = set()
    for note in notes:
        if note.do in (BEGIN, COMMIT):
            noted[note.attempt_id, note.step].add(note.weights)
        if note.do == BEGIN:
            begun.add((note.attempt_id, note.step))
    same = all(len(weights) == 1 for weights in noted.values())
    return same and all(_known(attempt_id, step, noted) for attempt_id, step in begun)


def _known(attempt_id: AttemptId, step: int, noted: Mapping[tuple[AttemptId, int], set[str]]) -> bool:
    """Return whether a world resumed from weights that an earlier one recorded, or from the step after them.

    A step that was prepared when its world ended may be applied although no surviving rank recorded it.
    """
    earlier = [at for at in noted if at[0] < attempt_id]
    made = [at for at in earlier if at[1] == step]
    if made:
        return noted[max(made)] == noted[attempt_id, step]
    return not earlier or step == max(earlier)[1] + 1
