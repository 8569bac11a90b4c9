"""The kill drill runs, resumes after an interruption, and detects the faults that it exists for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
DRILL = ROOT / "drills" / "checkpoint.py"


def drill(out: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, str(DRILL), *words, "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=540)
    written = list(out.glob("checkpoint*.json"))
    assert len(written) == 1, ended.stderr
    return ended.returncode, json.loads(written[0].read_text())["rows"]


@pytest.mark.thorough
def test_ranks_killed_while_saving_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    code, rows = drill(tmp_path, "kills", "--trials", "3", "--seed", "7")
    assert [row["note"] for row in rows if row["held"] is not True] == []
    assert (code, rows[-1]["n"], rows[-1]["hash_equal"]) == (0, 3, True)
    code, rows = drill(tmp_path, "kills", "--trials", "3", "--seed", "7", "--seconds", "0")
    assert (code, rows[-1]["n"]) == (0, 3), "trials that were made are kept"


def test_damage_anywhere_in_the_newest_commit_is_found(tmp_path: Path) -> None:
    code, rows = drill(tmp_path, "damage", "--damages", "24")
    assert (code, [row["held"] for row in rows]) == (0, [True]), rows


@pytest.mark.thorough
def test_touch_is_answered_and_disk_speed_measured_alongside(tmp_path: Path) -> None:
    _, (row,) = drill(tmp_path, "touch", "--quick")
    assert (row["n"], "s of disk for 2 MB" in row["note"]) == (5, True), row
    assert "the answer is" not in row["note"], row


# Checks of the drill


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "drills"))
    import _saving.kills as module

    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "_saving"]:
        del sys.modules[name]


@pytest.fixture
def note(kills: ModuleType) -> Callable[..., Any]:
    from _saving.job import Note

    def make(do: str, step: int, digest: str, **more: Any) -> Any:
        usual = {"at": 1.0, "rank": 0, "pid": 1, "pair": (1, 1), "generators": "g", "durable": 0, "samples": ()}
        return Note(do=do, step=step, digest=digest, **(usual | more))

    return make


@pytest.fixture
def book(note: Callable[..., Any]) -> Any:
    """Two ranks completed steps 5 and 6. Step 5 was saved, and is durable."""
    from _saving.job import Book

    made = Book()
    for rank in (0, 1):
        made.add(note("saved", 5, "five", rank=rank))
        made.add(note("made", 5, "five", rank=rank, generators=f"g{rank}"))
        made.add(note("made", 6, "six", rank=rank, durable=5))
    return made


def test_a_commit_that_is_what_was_noted_is_no_failure(kills: ModuleType, book: Any) -> None:
    assert kills.judge_found(kills.Found(step=5, digest="five", failures=()), book) == []
    assert kills.judge_found(kills.Found(step=6, digest="six", failures=()), book) == []


@pytest.mark.parametrize(
    ("step", "digest", "why"),
    [
        (5, "six", "bits that no rank noted"),
        (7, "seven", "bits that no rank noted"),
        (4, "", "durable"),
        (0, "", "durable"),
    ],
)
def test_a_commit_that_was_never_made_or_is_missing_is_a_failure(
    kills: ModuleType, book: Any, step: int, digest: str, why: str
) -> None:
    assert why in "; ".join(kills.judge_found(kills.Found(step=step, digest=digest, failures=()), book))


@pytest.mark.parametrize(
    ("begun", "why"),
    [
        ([(5, "five", "g0"), (5, "five", "g1")], ""),
        ([(5, "five", "g1"), (5, "five", "g1")], "rank 0 of (1, 2) began with other random generators"),
        ([(5, "six", "g0"), (5, "six", "g1")], "bits that no rank noted"),
        ([(5, "five", "g0"), (6, "six", "g1")], "different states"),
        ([(0, "anew", "g0"), (0, "anew", "g1")], "a checkpoint of step 5 was published"),
    ],
)
def test_a_world_that_begins_with_something_else_is_a_failure(
    kills: ModuleType, book: Any, note: Callable[..., Any], begun: list[tuple[int, str, str]], why: str
) -> None:
    for rank, (step, digest, generators) in enumerate(begun):
        book.add(note("begin", step, digest, rank=rank, pair=(1, 2), generators=generators))
    found = kills.Found(step=5, digest="five", failures=())
    failures = kills.judge_resumed(found, book, (1, 2))
    assert why in "; ".join(failures)
    assert bool(why) is bool(failures)


@pytest.mark.parametrize(("generators", "failures"), [("h1", 0), ("g1", 1)])
def test_a_rank_that_replaces_another_has_its_generators_at_each_step(
    kills: ModuleType, book: Any, note: Callable[..., Any], generators: str, failures: int
) -> None:
    """Rank 0 was killed before it noted step 7."""
    book.add(note("made", 7, "seven", rank=1, generators="h1"))
    book.add(note("begin", 7, "seven", rank=0, pair=(1, 3), generators="h0"))
    book.add(note("begin", 7, "seven", rank=1, pair=(1, 3), generators=generators))
    found = kills.Found(step=5, digest="five", failures=())
    assert len(kills.judge_resumed(found, book, (1, 3))) == failures


def test_a_step_that_is_made_again_otherwise_is_remembered(book: Any, note: Callable[..., Any]) -> None:
    book.add(note("made", 6, "six", pair=(1, 2)))
    assert book.parted == []
    book.add(note("made", 6, "other", pair=(1, 2)))
    assert book.parted == [6]


def test_the_same_seed_strikes_alike(kills: ModuleType) -> None:
    plans = [kills.Plan.of(1, number) for number in range(200)]
    assert plans == [kills.Plan.of(1, number) for number in range(200)]
    assert {plan.kind for plan in plans} == set(kills.Kind)


def test_a_torn_commit_is_seen_and_named(kills: ModuleType, tmp_path: Path, commit: Callable[..., Any]) -> None:
    commit(tmp_path, 5, {"w": os.urandom(100)})
    file = tmp_path / "step-5.g1.a1" / "rank-0.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    found = kills.look(tmp_path)
    assert found.step == 0
    assert "step-5.g1.a1 is corrupt" in found.failures[0]
