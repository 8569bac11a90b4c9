"""checkpoint-11: after a touch file, a job that trains soon acknowledges a durable checkpoint."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from _saving.job import Job, running
from holdfast.launcher.host.run_dir import TOUCH_ACK_FILE, TOUCH_FILE

DISK_FACTOR, SPARE_SECONDS, LONGEST_SECONDS = 1.2, 0.5, 30.0
_WARM_UP = 3
_BYTES_A_UNIT = 4 * 3 * (2 * 64 + 1)  # of the script's width: weights and two moments, biases left out


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Seconds from the touch to the answer, the step time at that moment, and whether the checkpoint exists."""

    seconds: float
    step: float
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """All answers, and the disk's time for the same number of bytes."""

    found: tuple[Answer, ...]
    nbytes: int
    disk: float

    def bound(self, answer: Answer) -> float:
        """Return the limit for an answer in seconds."""
        return answer.step + DISK_FACTOR * self.disk + SPARE_SECONDS

    @property
    def late(self) -> list[float]:
        """The answers over their limit."""
        return [one.seconds for one in self.found if one.seconds > self.bound(one)]

    @property
    def failures(self) -> list[str]:
        """Other failures."""
        late = [f"{one.seconds:.1f} s to an answer" for one in self.found if one.seconds > LONGEST_SECONDS]
        return [one.failure for one in self.found if one.failure] + late


def drill(folder: Path, *, seed: int, times: int, width: int) -> Answers:
    """Touch the file this many times, at random instants of steps and saves."""
    nbytes = width * _BYTES_A_UNIT
    disk = limit(folder, nbytes)
    rng = random.Random(seed)  # noqa: S311
    words = ["--checkpoint-interval=100000", "--warm-processes=none", "--checkpoint-keep=2"]
    with running(folder / "job", words=words, DRILL_WIDTH=str(width), DRILL_PACE="0") as job:
        job.await_steps(5)
        found = [_touch(job, rng.uniform(0, 0.2)) for _ in range(_WARM_UP + times)][_WARM_UP:]
    disk = sorted([*disk, *limit(folder, nbytes)])
    return Answers(found=tuple(found), nbytes=nbytes, disk=disk[len(disk) // 2])


def limit(folder: Path, nbytes: int) -> list[float]:
    """Return the seconds for writing this many bytes past the page cache, by two threads, fsynced."""
    from _checkpoint.contenders import Disk, State

    write = Disk(folder / "limit", State(nbytes, torch.float32))
    seconds = [write() for _ in range(6)][1:]
    (folder / "limit").unlink()
    return seconds


def _touch(job: Job, pause: float) -> Answer:
    time.sleep(pause)
    answer = job.run_dir / TOUCH_ACK_FILE
    answer.unlink(missing_ok=True)
    began = time.monotonic()
    (job.run_dir / TOUCH_FILE).touch()
    job.wait(answer.exists, "an answer to the touch-file")
    seconds = time.monotonic() - began
    told = json.loads(answer.read_text())
    step = float(job.status.get("stepSeconds") or 0.0)
    return Answer(seconds=seconds, step=step, failure=_failure(job.checkpoints, told))


def _failure(folder: Path, told: dict[str, object]) -> str:
    if told["result"] != "Committed":
        return f"the answer is {told['result']}"
    commits = list(folder.glob(f"step-{told['step']}.g*.a*/MANIFEST.json"))
    return "" if commits else f"step {told['step']} was answered and is not there"
