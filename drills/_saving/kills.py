"""checkpoint-9: processes of a job that trains and saves are killed at random instants.

After each kill, all survivors are stopped and the folder is checked. The newest checkpoint must be complete, and the
script must have recorded its digest before it was written. No checkpoint that was reported as durable may be missing.
The job must then resume from it or from a newer copy in memory, with the recorded bits of that step.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import xxhash

from _saving.job import RUN, Book, DrillError, Job, Pair, frozen, is_dead, running, signal_to
from holdfast.checkpoint.folder.claims import list_claims
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.rank_reader import Loaded
from holdfast.checkpoint.restore.search import Restored, restore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.errors import HoldfastError

INTERVAL_STEPS, FULL_EVERY = 3, 3
_ENDED_SECONDS = 20.0


class Kind(StrEnum):
    """The processes that are killed."""

    RANK = "one rank SIGKILLed"
    RANKS = "all ranks SIGKILLed"
    LAUNCHER = "launcher SIGKILLed"
    ANY = "any process SIGKILLed"
    AGAIN = "all ranks SIGKILLed, then any process while it recovers"


WEIGHTS = {Kind.RANK: 40, Kind.RANKS: 40, Kind.LAUNCHER: 8, Kind.ANY: 6, Kind.AGAIN: 6}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a trial, which depends only on seed and number."""

    kind: Kind
    after: float
    pick: float
    again: float

    @classmethod
    def of(cls, seed: int, number: int) -> Plan:
        """Draw the plan."""
        rng = random.Random(f"{seed}/{number}")  # noqa: S311  (a draw, not a secret)
        kind = rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
        return cls(kind=kind, after=rng.uniform(0.0, 0.4), pick=rng.random(), again=rng.uniform(0.0, 0.5))


class WrongBits(str):
    """A failure in which the state differs from the saved one."""

    __slots__ = ()


def hash_equal(failures: Iterable[str]) -> bool:
    """Return whether all compared states were equal to the saved ones."""
    return not any(isinstance(failure, WrongBits) for failure in failures)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one trial."""

    number: int
    kind: str
    made: int = 0
    """The newest step at the time of the kill."""
    committed: int = 0
    """The newest step that could be restored at that time."""
    went_on: int = 0
    """The step from which the job resumed."""
    resumed: float | None = None
    """Seconds from the kill to the first step of another world; None if no world ended."""
    failures: list[str] = field(default_factory=list)
    hash_equal: bool = True

    @property
    def lost(self) -> int:
        """Steps that were trained again."""
        return max(0, self.made - self.went_on)


def digest_of(loaded: Loaded) -> str:
    """Return the digest as the script computes it."""
    digest = xxhash.xxh3_128()
    for name in sorted(loaded.tensors):
        digest.update(name.encode())
        digest.update(loaded.tensors[name])
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a check of the folder: the checkpoint that was read, and failures."""

    step: int
    digest: str
    failures: tuple[str, ...]


def look(folder: Path) -> Found:
    """Read the newest checkpoint as a new job would."""
    try:
        found = restore(folder, SingleRank(), claims=list_claims(folder), job_uid=RUN)
    except HoldfastError as error:
        return Found(step=0, digest="", failures=(f"cannot be restored: {error}",))
    failures = [f"{bad.path} is corrupt: {bad.reason}" for bad in found.lost]
    if found.loaded is None:
        return Found(step=0, digest="", failures=tuple(failures))
    failures += _not_whole(folder, found)
    return Found(step=found.step, digest=digest_of(found.loaded), failures=tuple(failures))


def _not_whole(folder: Path, found: Restored) -> Iterator[str]:
    loaded = found.loaded
    if loaded is None:
        return
    verdict = verify(FolderStore(folder), loaded.name)
    if not verdict.verified:
        yield f"{loaded.name} is not complete: {verdict.reason}"
    if loaded.manifest.objects["noted"]["digest"] != digest_of(loaded):
        yield WrongBits(f"{loaded.name} does not hold what its script saved")


def judge_found(found: Found, book: Book) -> list[str]:
    """Return the failures of what could be restored after a kill. Pure."""
    failures = list(found.failures)
    if found.step and found.digest not in book.digests.get(found.step, set()):
        failures.append(WrongBits(f"step {found.step} can be restored with bits that no rank noted for it"))
    if found.step < book.durable:
        failures.append(f"step {book.durable} was durable, and step {found.step} is the newest that can be restored")
    return failures


def judge_resumed(found: Found, book: Book, pair: Pair) -> list[str]:
    """Return the failures of the state with which a new world began. Pure."""
    begun = book.begun[pair].values()
    steps = {note.step for note in begun}
    if len(steps) != 1 or len({note.digest for note in begun}) != 1:
        return [f"the ranks of {pair} began with different states: steps {sorted(steps)}"]
    (step,) = steps
    failures = (
        [f"{pair} continued from step {step}; a checkpoint of step {found.step} was published"]
        if step < found.step
        else []
    )
    if step and any(note.digest not in book.digests.get(step, set()) for note in begun):
        failures.append(WrongBits(f"{pair} began with bits that no rank noted for step {step}"))
    # A rank that was killed before it noted the step has noted no generators for it.
    others = [n.rank for n in begun if n.generators not in book.generators.get((step, n.rank), {n.generators})]
    failures += [f"rank {rank} of {pair} began with other random generators than it noted" for rank in others]
    return failures


class Killer:
    """One job for all trials."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job, self._seed = job, seed

    def trial(self, number: int) -> Trial:
        """Kill, check, and wait until the job trains again. The trial has the failures of the checks."""
        plan = Plan.of(self._seed, number)
        try:
            return self._trial(number, plan)
        except DrillError as error:
            self._job.kill()
            return Trial(number=number, kind=str(plan.kind), failures=[str(error)])

    def _trial(self, number: int, plan: Plan) -> Trial:
        job = self._job
        job.await_steps(2)
        time.sleep(plan.after)
        parted, struck = len(job.book.parted), time.monotonic()
        found, last = self._strike(plan.kind, plan.pick), struck
        before, made, failures = job.book.pair, job.book.reached, judge_found(found, job.book)
        if plan.kind is Kind.AGAIN:
            time.sleep(plan.again)
            last = time.monotonic()
            failures += judge_found(self._strike(Kind.ANY, plan.pick), job.book)
        book = job.await_steps(1, above=(0, 0) if plan.kind is Kind.ANY else before, since=last)
        pair = book.pair
        moved = pair > before
        if moved:
            failures += judge_resumed(found, book, pair)
        failures += [WrongBits(f"step {step} was made again with other bits") for step in book.parted[parted:]]
        return Trial(
            number=number,
            kind=str(plan.kind),
            made=made,
            committed=found.step,
            went_on=book.begun[pair][0].step if moved else made,
            resumed=book.first[pair] - struck if moved else None,
            failures=failures,
            hash_equal=hash_equal(failures),
        )

    def _strike(self, kind: Kind, pick: float) -> Found:
        """Kill, and check the folder while no process of the job writes."""
        pid = self._job.pid
        with frozen(pid) as below:
            self._job.read()
            victims = self._victims(kind, pick, below)
            signal_to(victims, signal.SIGKILL)
            if pid in victims:
                signal_to(below, signal.SIGCONT)  # processes that a pipe notifies must run to read it
                victims = [*victims, *below]
            self._job.wait(lambda: all(map(is_dead, victims)), "the killed processes to end", _ENDED_SECONDS)
            self._job.read()
            return look(self._job.checkpoints)

    def _victims(self, kind: Kind, pick: float, below: list[int]) -> list[int]:
        book = self._job.book
        ranks = [note.pid for _, note in sorted(book.begun.get(book.pair, {}).items())]
        match kind:
            case Kind.RANK:
                return [ranks[int(pick * len(ranks))]]
            case Kind.RANKS | Kind.AGAIN:
                return ranks
            case Kind.LAUNCHER:
                return [self._job.pid]
            case Kind.ANY:
                everyone = sorted([self._job.pid, *below])
                return [everyone[int(pick * len(everyone))]]


@contextmanager
def killer(folder: Path, *, seed: int, width: int) -> Iterator[Killer]:
    """Start a job of two ranks that saves all the time."""
    words = [f"--checkpoint-interval={INTERVAL_STEPS}", f"--checkpoint-full-every={FULL_EVERY}", "--warm-processes=2"]
    with running(folder, words=words, DRILL_WIDTH=str(width), DRILL_FROZEN="1") as job:
        job.wait(lambda: job.status.get("warmProcesses", 0) >= job.processes, "processes on standby")
        yield Killer(job, seed)
