"""Checkpoints: what the schema accepts, and its messages."""

from __future__ import annotations

from typing import Any

import pytest

from .jobs import LOCAL, MEMORY, OBJECT, VOLUME, Jobs, job

BAD: list[tuple[str, list[tuple[str, Any]], str]] = [
    # -- checkpoints
    ("no steps between checkpoints", [("spec.checkpoint.intervalSteps", 0)], "greater than or equal to 1"),
    ("no time between checkpoints", [("spec.checkpoint.intervalSeconds", 0)], "greater than or equal to 1"),
    ("negative interval", [("spec.checkpoint.intervalSteps", -5)], "greater than or equal to 1"),
    ("interval with a unit", [("spec.checkpoint.intervalSeconds", "30s")], "must be of type integer"),
    (
        "two intervals",
        [("spec.checkpoint", {"intervalSteps": 50, "intervalSeconds": 300})],
        "both intervalSteps and intervalSeconds: set only one of them",
    ),
    ("no full checkpoint", [("spec.checkpoint.fullEvery", 0)], "spec.checkpoint.fullEvery"),
    ("endless deltas", [("spec.checkpoint.fullEvery", 101)], "spec.checkpoint.fullEvery"),
    (
        "a threshold without deltas",
        [("spec.checkpoint.deltaThreshold", 0.001)],
        "set fullEvery above 1",
    ),
    ("no threshold", [("spec.checkpoint", {"fullEvery": 8, "deltaThreshold": 0})], "deltaThreshold"),
    ("a threshold too high", [("spec.checkpoint", {"fullEvery": 8, "deltaThreshold": 1.5})], "deltaThreshold"),
    ("a threshold in words", [("spec.checkpoint", {"fullEvery": 8, "deltaThreshold": "low"})], "deltaThreshold"),
    ("interval as a word", [("spec.checkpoint.intervalSteps", "Auto")], "must be of type integer"),
    (
        "interval of more than 30 days",
        [("spec.checkpoint.intervalSeconds", 2592001)],
        "less than or equal to 2592000",
    ),
    ("interval as a fraction", [("spec.checkpoint.intervalSteps", 0.5)], "must be of type integer"),
    ("volume without a claim", [("spec.checkpoint.volume", {})], "volume.claimName: Required value"),
    ("claim with a bad name", [("spec.checkpoint.volume.claimName", "My Claim")], "should match"),
    ("nothing kept", [("spec.checkpoint.retention.keepLast", 0)], "greater than or equal to 1"),
    ("the best of what", [("spec.checkpoint.retention.keepBest", [{"mode": "Max"}])], "metric"),
    ("a metric in words", [("spec.checkpoint.retention.keepBest", [{"metric": "val loss"}])], "should match"),
    (
        "a mode that is none",
        [("spec.checkpoint.retention.keepBest", [{"metric": "a", "mode": "min"}])],
        '"Min", "Max"',
    ),
    ("a metric twice", [("spec.checkpoint.retention.keepBest", [{"metric": "a"}] * 2)], "Duplicate value"),
    ("no day kept", [("spec.checkpoint.retention.keepDaily", 0)], "greater than or equal to 1"),
    ("hours beyond a year", [("spec.checkpoint.retention.keepHours", 8761)], "less than or equal to 8760"),
    (
        "time between copies without a volume",
        [(OBJECT, {"url": "s3://b/p", "intervalSeconds": 0})],
        "without a volume set checkpoint.intervalSeconds",
    ),
    (
        "retention of copies without a volume",
        [(OBJECT, {"url": "s3://b/p", "retention": {}})],
        "without a volume set checkpoint.retention",
    ),
    (
        "bandwidth of copies without a volume",
        [(OBJECT, {"url": "s3://b/p", "maxBytesPerSecond": "1Mi"})],
        "without a volume set checkpoint.maxBytesPerSecond",
    ),
    (
        "a folder as the only object store",
        [(OBJECT, {"url": "file:///checkpoints"})],
        "set the URL of an object store, or checkpoint.volume",
    ),
    (
        "an object store without the launcher",
        [("spec.rendezvous.backend", "C10d"), (OBJECT, {"url": "s3://b/p"})],
        "or use only checkpoint.volume",
    ),
    ("an object store without a URL", [(VOLUME, "c"), (OBJECT, {})], "object.url: Required value"),
    ("a URL without a scheme", [(VOLUME, "c"), (OBJECT, {"url": "bucket/prefix"})], "should match"),
    ("credentials in a URL", [(VOLUME, "c"), (OBJECT, {"url": "s3://key:secret@b/p"})], "should match"),
    (
        "a limit without bytes",
        [(VOLUME, "c"), (OBJECT, {"url": "s3://b", "maxBytesPerSecond": "0"})],
        "must be above 0",
    ),
    (
        "no day of copies kept",
        [(VOLUME, "c"), (OBJECT, {"url": "s3://b", "retention": {"keepDaily": 0}})],
        "object.retention.keepDaily",
    ),
    (
        "copies now and then",
        [(VOLUME, "c"), (OBJECT, {"url": "s3://b", "intervalSeconds": "daily"})],
        "of type integer",
    ),
    ("memory of no size", [(MEMORY, {})], "memory.sizeLimit: Required value"),
    (
        "memory in words",
        [(VOLUME, "c"), (MEMORY, {"sizeLimit": "much"})],
        "should match",
    ),
    (
        "memory without a volume and an object store",
        [(MEMORY, {"sizeLimit": "1Gi"})],
        "checkpoint.memory requires checkpoint.volume or checkpoint.object",
    ),
    ("a disk of no size", [(VOLUME, "c"), (LOCAL, {})], "local.sizeLimit: Required value"),
    ("a disk in words", [(VOLUME, "c"), (LOCAL, {"sizeLimit": "much"})], "should match"),
    (
        "a commit on disk after no step",
        [(VOLUME, "c"), (LOCAL, {"sizeLimit": "1Gi", "intervalSteps": 0})],
        "local.intervalSteps: Invalid value",
    ),
    (
        "a disk without a volume and an object store",
        [(LOCAL, {"sizeLimit": "1Gi"})],
        "checkpoint.local requires checkpoint.volume or checkpoint.object",
    ),
    (
        "a local tier without the launcher",
        [("spec.rendezvous.backend", "C10d"), (VOLUME, "c"), (LOCAL, {"sizeLimit": "1Gi"})],
        "or use only checkpoint.volume",
    ),
    (
        "copies more often than what is copied",
        [(VOLUME, "c"), (MEMORY, {"sizeLimit": "1Gi", "intervalSteps": 2}), ("spec.checkpoint.peer", {})],
        "peer.intervalSteps is not a multiple of memory.intervalSteps",
    ),
    ("copies of nothing", [("spec.checkpoint.peer", {})], "checkpoint.peer requires checkpoint.memory"),
    ("unknown resume", [("spec.checkpoint.resume", "Maybe")], 'supported values: "Always", "Never"'),
]

GOOD: list[tuple[str, list[tuple[str, Any]]]] = [
    ("an interval in steps", [("spec.checkpoint.intervalSteps", 50)]),
    ("an interval of an hour", [("spec.checkpoint.intervalSeconds", 3600)]),
    ("deltas", [("spec.checkpoint.fullEvery", 8)]),
    ("deltas that leave out little", [("spec.checkpoint", {"fullEvery": 8, "deltaThreshold": 0.0001})]),
    ("copies to an object store", [(VOLUME, "c"), (OBJECT, {"url": "s3://b/p", "secretRef": {"name": "s"}})]),
    (
        "copies with rules of their own",
        [(VOLUME, "c"), (OBJECT, {"url": "s3://b/p", "intervalSeconds": 9, "retention": {"keepDaily": 7}})],
    ),
    (
        "an object store without a volume",
        [(OBJECT, {"url": "s3://b/p"}), ("spec.checkpoint.retention", {"keepLast": 5, "keepDaily": 7})],
    ),
    (
        "every tier but a volume",
        [
            (OBJECT, {"url": "s3://b/p"}),
            (MEMORY, {"sizeLimit": "1Gi"}),
            (LOCAL, {"sizeLimit": "1Gi"}),
            ("spec.checkpoint.peer", {}),
        ],
    ),
]


def test_the_table_is_long_enough_and_names_each_case_once() -> None:
    names = [name for name, _changes, _says in BAD]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.parametrize(("changes", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_job_is_refused_in_words_that_help(trial: Jobs, changes: list[tuple[str, Any]], says: str) -> None:
    assert says in trial.refusal(job(*changes))


@pytest.mark.parametrize("changes", [g[1] for g in GOOD], ids=[g[0] for g in GOOD])
def test_a_good_job_is_taken_as_it_is(trial: Jobs, changes: list[tuple[str, Any]]) -> None:
    wanted = job(*changes)
    made = trial.create(wanted, dry_run="All")
    assert made["spec"]["workers"]["template"] == wanted["spec"]["workers"]["template"]


def test_object_store_gets_no_defaults_that_only_copies_may_have(trial: Jobs) -> None:
    made = trial.create(job((OBJECT, {"url": "s3://b/p"})), dry_run="All")
    assert made["spec"]["checkpoint"]["object"] == {"url": "s3://b/p"}
