"""What a drill's training script noted: who took which samples, who committed which step, with which weights. Pure.

A step counts as committed in the highest world in which some rank says so; its samples are those that all ranks of
that world took for it. A rank that is killed between the commit and its own note is so not taken for a loss.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.drill.sight import Pair

BEGIN, TAKE, COMMIT, STRUCK = "begin", "take", "commit", "struck"


@dataclass(frozen=True, kw_only=True)
class Note:
    """One line. `at` is in seconds of the machine's clock, which all nodes share."""

    at: float
    do: str
    pod: str
    pair: Pair
    step: int
    samples: tuple[int, ...] = ()
    weights: str = ""


def read(folder: Path) -> list[Note]:
    """All notes so far, in the order of time."""
    lines = (line for file in folder.glob("notes-*.jsonl") for line in file.read_text().splitlines(keepends=True))
    return sorted((_note(line) for line in lines if line.endswith("}\n")), key=lambda note: note.at)


def _note(line: str) -> Note:
    told = json.loads(line)
    return Note(
        at=float(told["at"]),
        do=told["do"],
        pod=told["pod"],
        pair=Pair(generation=told["pair"][0], attempt=told["pair"][1]),
        step=int(told["step"]),
        samples=tuple(told.get("samples", ())),
        weights=told.get("weights", ""),
    )


def clear(folder: Path) -> None:
    """Forget what was noted so far; who still writes appends at the new end."""
    for file in folder.glob("notes-*.jsonl"):
        os.truncate(file, 0)


def whole(notes: list[Note], until: float) -> list[Note]:
    """Without the first steps after `clear`, of which some ranks' notes are gone, and what came after `until`.

    Files are read one after the other while ranks write: what a rank took may be missing in a file that was read
    early, and the step that it was taken for be committed in one that was read late. Say when the reading began.
    """
    notes = [note for note in notes if note.at <= until]
    takes = [(note.pair, note.step) for note in notes if note.do == TAKE]
    if not takes:
        return []
    pair, step = min(takes)
    return [note for note in notes if note.pair > pair or note.step > step + 1]


def newest_pair(notes: Iterable[Note]) -> Pair:
    """The highest world in which a step was committed."""
    return max((note.pair for note in notes if note.do == COMMIT), default=Pair(generation=0, attempt=0))


def struck_at(notes: Iterable[Note], since: float) -> float | None:
    """When the script itself failed as it was told to."""
    return next((note.at for note in notes if note.do == STRUCK and note.at >= since), None)


def resumed_at(notes: Iterable[Note], before: Pair, since: float) -> float | None:
    """The first step that a world after `before` committed."""
    return next((n.at for n in notes if n.do == COMMIT and n.pair > before and n.at >= since), None)


def longest_pause(notes: Iterable[Note], since: float) -> float | None:
    """Between two steps of a job that nothing ended; None if it made none."""
    times = sorted(note.at for note in notes if note.do == COMMIT and note.at >= since)
    return max((later - at for at, later in itertools.pairwise([since, *times])), default=None)


def lost_steps(notes: Iterable[Note], before: Pair) -> int:
    """Steps committed up to `before` and made again after it."""
    commits = [note for note in notes if note.do == COMMIT]
    last = max((note.step for note in commits if note.pair <= before), default=0)
    first = min((note.step for note in commits if note.pair > before), default=last + 1)
    return max(0, last + 1 - first)


def wrong_samples(notes: Iterable[Note], *, batch: int, epoch: int) -> int:
    """Samples that a committed step missed, or that it or its epoch saw twice; an epoch is so many steps."""
    worlds: dict[int, Pair] = {}
    taken: dict[tuple[int, Pair], list[int]] = defaultdict(list)
    for note in notes:
        if note.do == COMMIT:
            worlds[note.step] = max(note.pair, worlds.get(note.step, note.pair))
        elif note.do == TAKE:
            taken[note.step, note.pair] += note.samples
    wrong, seen = 0, defaultdict[int, list[int]](list)
    for step, pair in worlds.items():
        samples = taken[step, pair]
        wrong += max(0, batch - len(set(samples)))
        seen[(step - 1) // epoch] += samples
    return wrong + sum(len(samples) - len(set(samples)) for samples in seen.values())


def weights_equal(notes: Iterable[Note]) -> bool:
    """All ranks had the same weights after each step, and began each world with those of the step it went on from."""
    after: dict[tuple[int, Pair], set[str]] = defaultdict(set)
    found: dict[tuple[int, Pair], set[str]] = defaultdict(set)
    for note in notes:
        if note.do in (BEGIN, COMMIT):
            (after if note.do == COMMIT else found)[note.step, note.pair].add(note.weights)
    same = all(len(weights) == 1 for weights in (*after.values(), *found.values()))
    return same and all(_known(step, pair, weights, after) for (step, pair), weights in found.items())


def _known(step: int, pair: Pair, weights: set[str], after: dict[tuple[int, Pair], set[str]]) -> bool:
    made = [(other, hashes) for (number, other), hashes in after.items() if number == step and other < pair]
    return not made or max(made)[1] == weights
