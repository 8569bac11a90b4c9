"""Retention deletes only what it may, and no checkpoint of a job's line is lost. `tiers` defines the invariants."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from explorer import Trace, explore, parse, play, shape_of, shrink, trace_of, workplace
from tier_ledger import Counts, Shape

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.policy import fencing, retention
from holdfast.checkpoint.policy.fencing import FencingDecision
from holdfast.checkpoint.restore import transfer
from holdfast.checkpoint.stores.base import Source
from holdfast.checkpoint.stores.fallback import FallbackStore
from holdfast.checkpoint.stores.folder import FolderStore

SEED, TRACES = 1, 100
PLAIN = Shape(keep_last=1, bucket=False, memory=False, local=False)
COPIED = replace(PLAIN, bucket=True)

START: Trace = (("start", 0, 0, 0, 0),)
SAVE: Trace = (("save", 0, 0, 0, 0),)
FLIP: Trace = (("damage", 0, 0, 0),)
AWAY: Trace = (("outage", 0),)
UPLOAD: Trace = (("upload", 0, 0, 0, 0),)
NEVER: Trace = (("start", 3, 0, 0, 0),)
RESUME: Trace = (("resume", 0, 0),)
REWIND: Trace = (("rewind", 1, 0),)

# The shortest traces that once lost a checkpoint.
LOSSES: dict[str, tuple[Shape, Trace]] = {
    "a job with resume Never, above another job's checkpoints": (PLAIN, START + SAVE + NEVER + SAVE),
    "the same in the object store": (COPIED, START + SAVE + UPLOAD + NEVER + SAVE + UPLOAD),
    "the newest checkpoint is corrupt on the volume while the object store is away": (
        replace(COPIED, keep_last=2),
        START + SAVE + SAVE + UPLOAD + FLIP + AWAY + START,
    ),
    "the same at the next start, after one that was refused": (
        replace(COPIED, keep_last=2),
        START + SAVE + SAVE + UPLOAD + FLIP + AWAY + START + START,
    ),
    "the newest checkpoint is left in the object store only, which then is away": (
        replace(COPIED, keep_last=2),
        START + SAVE + SAVE + UPLOAD + FLIP + START + AWAY + START,
    ),
    "an upload that fails removes the files of another upload of the same checkpoint": (
        COPIED,
        (*START, *SAVE, *START, ("upload", 0, 0, 6, 0), *FLIP, *UPLOAD, *RESUME),
    ),
    "the same while the failed upload is about to remove them": (
        COPIED,
        (*START, *SAVE, *FLIP, ("upload", 0, 0, 6, 0), *FLIP, *START, *UPLOAD, *RESUME),
    ),
    "the late claim of a lower attempt, after a higher attempt has claimed": (
        PLAIN,
        (*START, ("start", 0, 0, 1, 0), *SAVE, ("start", 0, 0, 2, 0), *RESUME),
    ),
    "the base of a delta that another attempt's uploader is about to publish": (
        replace(COPIED, full_every=2, local=True),
        (*START, *SAVE, *SAVE, ("upload", 0, 0, 3, 0), *SAVE, *START, ("resume", 0, 4), *UPLOAD, *RESUME),
    ),
}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder in memory."""
    with workplace() as folder:
        yield folder


@pytest.mark.parametrize("what", LOSSES)
def test_what_was_once_lost_is_kept(place: Path, what: str) -> None:
    assert play(place, *LOSSES[what]) is None


def test_random_traces_violate_no_invariant(place: Path) -> None:
    counts = Counts()
    found = explore(place, SEED, range(TRACES), counts)
    assert found is None, f"trace {found and found[0]} of seed {SEED}: {found and found[1]}"
    assert counts.restores > TRACES
    assert counts.uploads > TRACES / 4
    assert counts.deleted > TRACES / 2


def test_a_seed_gives_the_same_traces() -> None:
    first, second = (random.Random("7-3") for _ in range(2))
    assert (shape_of(first), trace_of(first)) == (shape_of(second), trace_of(second))


def _deletes_all_but_one(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda entries, claims, **more: real(entries, claims, **{**more, "keep_last": 1})


def _reads_everything(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda commit, claims, **more: FencingDecision(True)


def _reads_nothing(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda commit, claims, **more: FencingDecision(False)


def _is_empty(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda store, ask: ()


def _quarantines_all(real: Callable[..., Any]) -> Callable[..., Any]:
    def commits(store: FolderStore) -> Any:
        for name in real(store):
            catalog.quarantine(store._root, name, "no reason")
        return real(store)

    return commits


def _sends_all(real: Callable[..., Any]) -> Callable[..., Any]:
    def unverified(file: str, source: Source, *_: object) -> Iterator[memoryview]:
        whole = memoryview(bytearray(source.nbytes))
        source.read_into(0, whole)
        yield whole

    return unverified


def _deletes(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda root, name, reason: catalog.delete(root, [name])


def _writes_none(real: Callable[..., Any]) -> Callable[..., Any]:
    """Write no claim of the way back. Attempts also say whether they write theirs again."""
    return lambda store, claim, **again: real(store, claim, **again) if again else None


TWO = replace(PLAIN, keep_last=2)
BACK: Trace = (*START, *SAVE, *SAVE, *REWIND)
OVERTAKEN: Trace = (
    ("start", 0, 0, 0, 0),
    ("save", 0, 0, 0, 0),
    ("upload", 0, 0, 0, 18),
    ("start", 0, 0, 1, 0),
    ("upload", 0, 0, 3, 0),
    ("upload", 0, 0, 1, 0),
    ("damage", 0, 0, 0),
    ("resume", 0, 0),
    ("resume", 0, 0),
    ("resume", 0, 0),
)
WEAKENED: dict[str, tuple[object, str, Callable[[Any], Any], str, Shape, Trace]] = {
    "retention keeps one": (retention, "decide", _deletes_all_but_one, "I2", TWO, START + SAVE + SAVE),
    "no fence": (fencing, "readable", _reads_everything, "I6", PLAIN, START + SAVE + NEVER),
    "a fence before all": (fencing, "readable", _reads_nothing, "I2", PLAIN, START + SAVE + START),
    "copies are never asked": (
        FallbackStore,
        "_found",
        _is_empty,
        "I2",
        COPIED,
        START + SAVE + UPLOAD + FLIP,
    ),
    "damage is sent over a copy that another uploader has published": (
        transfer,
        "_verified",
        _sends_all,
        "I4",
        COPIED,
        OVERTAKEN,
    ),
    "the way back deletes": (catalog, "move_to_quarantine", _deletes, "I7", TWO, BACK),
    "the way back does not claim": (FolderStore, "write_claim", _writes_none, "I7", TWO, BACK),
    "good copies go to quarantine": (FolderStore, "commits", _quarantines_all, "I2", PLAIN, START + SAVE + START),
}


@pytest.mark.parametrize("what", WEAKENED)
def test_weakened_code_is_found(place: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    owner, name, weaken, invariant, shape, trace = WEAKENED[what]
    assert play(place, shape, trace) is None
    monkeypatch.setattr(owner, name, weaken(getattr(owner, name)))
    found = play(place, shape, trace)
    assert found is not None
    assert found.message.startswith(invariant)


def test_the_shortest_trace_is_reported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "decide", _deletes_all_but_one(retention.decide))
    noise: Trace = (("snapshot",), ("outage", 0), ("outage", 0))
    found = play(place, replace(TWO, local=True), START + noise + SAVE + START + SAVE + noise + SAVE)
    assert found is not None
    shortest = shrink(place, found)
    assert (shortest.shape, shortest.trace) == (TWO, START + SAVE + SAVE)
    assert "deleted step-5.g1.a1 of its line from volume" in str(shortest)
    assert parse(str(shortest).partition("trace = ")[2].partition("\n)")[0] + "\n)") == shortest.trace
