"""checkpoint-10: a job that is interrupted repeatedly has the same bits as one that never was. It continues from a
checkpoint, or from the memory of a surviving rank. Its steps have the same samples for any number of ranks."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from _saving.job import Book, Job, signal_to

INTERVAL_STEPS = 5
NEVER = 1_000_000  # as an interval in steps


def _job(folder: Path, steps: int, *, processes: int = 2, noise: bool = True, interval: int = INTERVAL_STEPS) -> Job:
    words = [f"--checkpoint-interval={interval}", "--warm-processes=none"]
    environ = {"DRILL_STEPS": str(steps), "DRILL_PACE": "0.03"} | ({"DRILL_NOISE": "1"} if noise else {})
    return Job(folder, processes=processes, words=words, **environ)


def _undisturbed(folder: Path, steps: int) -> Book:
    job = _job(folder, steps)
    try:
        job.start()
        if job.finish():
            raise AssertionError(job.said())
        return job.book
    finally:
        job.close()


def bits(folder: Path, *, seed: int, cuts: int, steps: int) -> tuple[int, list[str]]:
    """Return how often a job was interrupted, and the steps at which weights, moments or samples differ from a run
    without interruption.

    Dropout and draws of every generator of every rank affect the weights.
    """
    rng = random.Random(seed)  # noqa: S311
    whole = _undisturbed(folder / "whole", steps)
    job, made = _job(folder / "cut", steps), 0
    try:
        while made < cuts and job.book.newest < steps:
            job.start()
            job.await_steps(2 + rng.randrange(steps // (2 * cuts)), above=job.book.pair, restart=False)
            time.sleep(rng.uniform(0, 0.1))
            job.kill()
            made += 1
        job.start()
        if job.finish():
            raise AssertionError(job.said())
    finally:
        job.close()
    return made, differences(whole, job.book)


def replaced(folder: Path, *, seed: int, cuts: int, steps: int) -> tuple[int, list[str]]:
    """Return how often a rank was killed and replaced from the memory of the other, and the differences as `bits`.

    The job writes no checkpoint, so a world that does not continue from memory starts from step 0.
    """
    rng = random.Random(seed)  # noqa: S311
    whole = _undisturbed(folder / "whole", steps)
    job, made = _job(folder / "cut", steps, interval=NEVER), 0
    try:
        job.start()
        while made < cuts and job.book.newest < steps:
            job.await_steps(2 + rng.randrange(steps // (2 * cuts)), above=job.book.pair, restart=False)
            time.sleep(rng.uniform(0, 0.1))
            ranks = job.book.begun[job.book.pair]
            signal_to([ranks[rng.randrange(len(ranks))].pid], signal.SIGKILL)
            made += 1
        if job.finish():
            raise AssertionError(job.said())
    finally:
        job.close()
    first, *later = job.book.begun
    lost = [pair for pair in later if any(note.step == 0 for note in job.book.begun[pair].values())]
    return made, [f"{pair} did not continue after {first}" for pair in lost] + differences(whole, job.book)


def differences(whole: Book, cut: Book) -> list[str]:
    """Return the differences, step by step. Pure."""
    failures = [
        f"step {step} was made with other bits"
        for step, digests in whole.digests.items()
        if not cut.digests.get(step, digests) <= digests
    ]
    failures += [f"step {step} was made twice, and otherwise" for step in cut.parted]
    failures += [
        f"rank {rank} had other generators at step {step}"
        for (step, rank), found in whole.generators.items()
        if not cut.generators.get((step, rank), found) <= found
    ]
    by_all = [step for step, by in whole.samples.items() if by.keys() == cut.samples.get(step, {}).keys()]
    failures += [f"step {step} took other samples" for step in by_all if taken(whole, step) != taken(cut, step)]
    if whole.newest != cut.newest:
        failures.append(f"step {cut.newest} was the last one, not {whole.newest}")
    return failures


def taken(book: Book, step: int) -> list[int]:
    """Return the samples of a step, over all ranks."""
    return sorted(sample for samples in book.samples[step].values() for sample in samples)


def sizes(folder: Path, worlds: tuple[int, ...], *, each: int) -> list[str]:
    """Return the wrong samples of a job that resumes with another number of ranks each time."""
    whole = _undisturbed(folder / "whole", each * len(worlds))
    failures: list[str] = []
    taken_by: dict[int, list[int]] = {}
    for number, size in enumerate(worlds, start=1):
        job = _job(folder / "sizes" / str(number), each * number, processes=size)
        job.checkpoints = folder / "commits"
        try:
            job.start()
            if job.finish():
                raise AssertionError(job.said())
        finally:
            job.close()
        taken_by |= {step: taken(job.book, step) for step in job.book.samples}
        if len(job.book.samples) != each:
            failures.append(f"{size} ranks made {len(job.book.samples)} steps, not {each}")
    failures += [
        f"step {step} took other samples" for step in whole.samples if taken_by.get(step) != taken(whole, step)
    ]
    return failures
