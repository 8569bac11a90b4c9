"""The spec as frozen dataclasses, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_operator.api.ids import AttemptId, parse_attempt_id
from holdfast_operator.api.job import parse_job
from holdfast_operator.api.spec.checkpoint import LocalTier, MemoryTier, ObjectTier, PeerTier
from holdfast_operator.api.spec.hang import HangSpec
from holdfast_operator.api.spec.recovery import Backoff
from holdfast_operator.api.spec.spec import parse_spec
from holdfast_operator.api.status.serialization import shorten
from holdfast_operator.api.times import format_time, parse_time
from holdfast_operator.errors import UnreadableError
from holdfast_operator.manifests.membership_document import settings

SMALLEST = {"workers": {"replicas": 2, "template": {"spec": {"containers": [{"name": "main", "image": "i"}]}}}}


def test_the_smallest_job_gets_the_schemas_defaults() -> None:
    spec = parse_spec(SMALLEST)
    assert (spec.replicas, spec.min_replicas, spec.replica_step) == (2, 2, 1)
    assert spec.shrinkable
    assert [(budget.cause, budget.max_restarts) for budget in spec.budgets] == [("Application", 3)]
    assert spec.checkpoint.interval == "Auto"
    assert spec.startup_deadline_seconds == 1200


@pytest.mark.parametrize(
    ("given", "settings"),
    [({"intervalSteps": 50}, "50"), ({"intervalSeconds": 30}, "30s"), ({}, "Auto")],
)
def test_intervals_are_steps_or_seconds_or_the_jobs_choice(given: Any, settings: str) -> None:
    assert parse_spec({**SMALLEST, "checkpoint": given}).checkpoint.interval == settings


def test_deltas_are_asked_of_launchers_where_they_are_wanted() -> None:
    asked = parse_spec({**SMALLEST, "checkpoint": {"fullEvery": 8}})
    assert settings(asked)["checkpoint"]["fullEvery"] == 8
    assert "fullEvery" not in settings(parse_spec(SMALLEST))["checkpoint"]


def test_what_deltas_may_leave_out_is_said_where_it_is_wanted() -> None:
    asked = parse_spec({**SMALLEST, "checkpoint": {"fullEvery": 8, "deltaThreshold": 0.0001}})
    assert settings(asked)["checkpoint"]["deltaThreshold"] == 0.0001
    assert "deltaThreshold" not in settings(parse_spec(SMALLEST))["checkpoint"]


@pytest.mark.parametrize("value", [-0.1, 1.5, "0.1", True, None])
def test_a_threshold_that_is_none_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnreadableError, match=r"spec\.checkpoint\.deltaThreshold must be a number from 0 to 1"):
        parse_spec({**SMALLEST, "checkpoint": {"fullEvery": 8, "deltaThreshold": value}})


def test_retention_is_said_in_the_words_that_launchers_read() -> None:
    fields = {"keepLast": 5, "keepEvery": 10000, "keepHours": 6, "keepDaily": 7, "keepWeekly": 13}
    asked = parse_spec({**SMALLEST, "checkpoint": {"retention": fields}})
    assert (asked.checkpoint.keep_last, asked.checkpoint.retention) == (5, "hours=6,daily=7,weekly=13,every=10000")
    assert settings(asked)["checkpoint"]["retention"] == asked.checkpoint.retention
    assert "retention" not in settings(parse_spec(SMALLEST))["checkpoint"]
    copies = parse_spec({**SMALLEST, "checkpoint": {"object": {"url": "s3://b", "retention": fields}}})
    assert copies.checkpoint.object_store is not None
    assert copies.checkpoint.object_store.retention == asked.checkpoint.retention
    with pytest.raises(UnreadableError, match=r"spec\.checkpoint\.object\.retention\.keepDaily"):
        parse_spec({**SMALLEST, "checkpoint": {"object": {"url": "s3://b", "retention": {"keepDaily": -1}}}})


def test_best_by_a_metric_has_the_launchers_syntax() -> None:
    """The retention rule is written as launchers parse it."""
    best = [{"metric": "val_loss", "count": 3}, {"metric": "eval/acc-1", "mode": "Max"}]
    said = "every=10,best=val_loss:min:3,best=eval/acc-1:max:1"
    asked = parse_spec({**SMALLEST, "checkpoint": {"retention": {"keepEvery": 10, "keepBest": best}}})
    assert asked.checkpoint.retention == said
    copies = parse_spec({**SMALLEST, "checkpoint": {"object": {"url": "s3://b", "retention": {"keepBest": best}}}})
    assert copies.checkpoint.object_store is not None
    assert copies.checkpoint.object_store.retention == said.removeprefix("every=10,")


@pytest.mark.parametrize(
    ("best", "says"),
    [
        ({"metric": "loss"}, r"retention\.keepBest is missing or no list"),
        ([{"metric": "loss"}, {}], r"retention\.keepBest\[1\]\.metric must be a name"),
        ([{"metric": "a,hours=9"}], r"retention\.keepBest\[0\]\.metric must be a name like val_loss"),
        ([{"metric": "loss", "mode": "min"}], r"retention\.keepBest\[0\]\.mode"),
        ([{"metric": "loss", "count": 0}], r"retention\.keepBest\[0\]\.count"),
    ],
)
def test_a_rule_for_the_best_that_is_none_is_refused_by_name(best: object, says: str) -> None:
    with pytest.raises(UnreadableError, match=says):
        parse_spec({**SMALLEST, "checkpoint": {"retention": {"keepBest": best}}})


def test_the_bandwidth_of_the_volume_has_a_limit() -> None:
    spec = parse_spec({**SMALLEST, "checkpoint": {"maxBytesPerSecond": "1Gi"}})
    assert settings(spec)["checkpoint"]["bytesPerSecond"] == 1 << 30
    assert "bytesPerSecond" not in settings(parse_spec(SMALLEST))["checkpoint"]
    with pytest.raises(UnreadableError, match=r"spec\.checkpoint\.maxBytesPerSecond"):
        parse_spec({**SMALLEST, "checkpoint": {"maxBytesPerSecond": "fast"}})


@pytest.mark.parametrize(
    ("given", "count"),
    [("1Gi", 1 << 30), ("1.5Ki", 1536), ("2M", 2_000_000), ("3e3", 3000), (4096, 4096), ("4096", 4096), ("1m", 1)],
)
def test_a_size_is_a_quantity_of_kubernetes(given: Any, count: int) -> None:
    assert parse_spec({**SMALLEST, "checkpoint": {"maxBytesPerSecond": given}}).checkpoint.bytes_per_second == count


@pytest.mark.parametrize("given", ["fast", "0", 0, -1, "-1Gi", "", True, "1Gi "])
def test_what_is_no_quantity_above_0_is_refused(given: Any) -> None:
    with pytest.raises(UnreadableError, match=r"maxBytesPerSecond must be a quantity above 0, for example 100Mi"):
        parse_spec({**SMALLEST, "checkpoint": {"maxBytesPerSecond": given}})


def test_a_memory_tier_has_its_intervals_in_steps() -> None:
    asked = parse_spec({**SMALLEST, "checkpoint": {"memory": {"sizeLimit": "16Gi"}, "peer": {}}}).checkpoint
    assert (asked.memory, asked.peer) == (MemoryTier(size="16Gi", interval=1), PeerTier(interval=1))
    asked = parse_spec({**SMALLEST, "checkpoint": {"memory": {"sizeLimit": "2Mi", "intervalSteps": 5}}}).checkpoint
    assert (asked.memory, asked.peer) == (MemoryTier(size="2Mi", interval=5), None)
    assert parse_spec(SMALLEST).checkpoint.memory is None


def test_a_local_tier_has_its_interval_in_steps() -> None:
    asked = parse_spec({**SMALLEST, "checkpoint": {"local": {"sizeLimit": "40Gi"}}}).checkpoint
    assert asked.local == LocalTier(size="40Gi", interval=10)
    asked = parse_spec({**SMALLEST, "checkpoint": {"local": {"sizeLimit": "2Mi", "intervalSteps": 5}}}).checkpoint
    assert asked.local == LocalTier(size="2Mi", interval=5)
    assert parse_spec(SMALLEST).checkpoint.local is None


@pytest.mark.parametrize(
    ("given", "has_shared_tier", "url_of_shared_tier", "url_of_copies"),
    [
        ({}, False, None, None),
        ({"volume": {"claimName": "c"}}, True, None, None),
        ({"object": {"url": "s3://b/p/"}}, True, "s3://b/p", None),
        ({"volume": {"claimName": "c"}, "object": {"url": "s3://b/p"}}, True, None, "s3://b/p"),
    ],
    ids=str,
)
def test_object_store_has_copies_of_a_volume_or_is_the_shared_tier(
    given: dict[str, Any], has_shared_tier: bool, url_of_shared_tier: str | None, url_of_copies: str | None
) -> None:
    asked = parse_spec({**SMALLEST, "checkpoint": given}).checkpoint
    assert asked.has_shared_tier == has_shared_tier
    assert (asked.shared_store.url if asked.shared_store else None) == url_of_shared_tier
    assert (asked.copies.url if asked.copies else None) == url_of_copies


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (None, "spec is"),
        ({}, "spec.workers"),
        ({"workers": {"replicas": 1}}, "spec.workers.template"),
        ({"workers": {"replicas": 0, "template": SMALLEST["workers"]["template"]}}, "spec.workers.replicas"),
        ({"workers": {"replicas": 1, "template": {"spec": {"containers": []}}}}, "containers is empty"),
        ({**SMALLEST, "elasticity": {"onFailure": "Panic"}}, "spec.elasticity.onFailure"),
        ({**SMALLEST, "elasticity": []}, "spec.elasticity"),
        ({**SMALLEST, "checkpoint": {"intervalSteps": 0}}, "spec.checkpoint.intervalSteps"),
        ({**SMALLEST, "checkpoint": {"intervalSeconds": "5m"}}, "spec.checkpoint.intervalSeconds"),
        (
            {**SMALLEST, "checkpoint": {"intervalSteps": 50, "intervalSeconds": 30}},
            "both intervalSteps and intervalSeconds",
        ),
        (
            {**SMALLEST, "checkpoint": {"object": {"url": "s3://b", "intervalSeconds": "soon"}}},
            "spec.checkpoint.object.intervalSeconds",
        ),
        (
            {**SMALLEST, "checkpoint": {"object": {"url": "s3://b", "maxBytesPerSecond": "much"}}},
            "object.maxBytesPerSecond",
        ),
        ({**SMALLEST, "checkpoint": {"local": "40Gi"}}, "spec.checkpoint.local"),
        ({**SMALLEST, "checkpoint": {"local": {"sizeLimit": "much"}}}, "spec.checkpoint.local.sizeLimit"),
        ({**SMALLEST, "checkpoint": {"memory": {"sizeLimit": 0}}}, "spec.checkpoint.memory.sizeLimit"),
        (
            {**SMALLEST, "checkpoint": {"local": {"sizeLimit": "1Gi", "intervalSteps": 0}}},
            "spec.checkpoint.local.intervalSteps",
        ),
        (
            {**SMALLEST, "checkpoint": {"local": {"sizeLimit": "1Gi", "intervalSteps": "1m"}}},
            "spec.checkpoint.local.intervalSteps",
        ),
        ({**SMALLEST, "recovery": {"budgets": [{"cause": "Weather", "maxRestarts": 1}]}}, "spec.recovery.budgets"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(spec: Any, field: str) -> None:
    with pytest.raises(UnreadableError, match=field.replace(".", r"\.").replace("[", r"\[")):
        parse_spec(spec)


def test_an_unreadable_job_is_still_a_job() -> None:
    job = parse_job({"metadata": {"name": "a", "namespace": "b", "uid": "c"}, "spec": {"workers": 7}})
    assert job.spec is None
    assert "spec.workers" in job.unreadable


def test_pairs_order_all_worlds() -> None:
    attempt_ids = [
        AttemptId(generation=2, attempt=1),
        AttemptId(generation=1, attempt=9),
        AttemptId(generation=1, attempt=2),
    ]
    assert [str(attempt_id) for attempt_id in sorted(attempt_ids)] == ["1.2", "1.9", "2.1"]
    assert parse_attempt_id({"generation": 1}) is None
    assert parse_attempt_id(None) is None


def test_times_are_the_contracts() -> None:
    text = "2026-01-31T12:00:00.000000Z"
    parsed = parse_time(text)
    assert parsed is not None
    assert format_time(parsed) == text
    assert parse_time("yesterday") is None


def test_back_off_doubles_up_to_its_limit() -> None:
    backoff = Backoff(initial_seconds=5, max_seconds=30)
    assert [backoff.seconds(count) for count in (0, 1, 2, 3, 4, 99)] == [0, 5, 10, 20, 30, 30]


def test_the_end_of_a_long_message_is_kept() -> None:
    assert shorten("x" * 50 + "ValueError", 20).endswith("ValueError")
    assert len(shorten("x" * 5000)) <= 1024


@pytest.mark.parametrize(
    ("given", "hang"),
    [
        ({}, HangSpec()),
        ({"stepTimeoutSeconds": 60}, HangSpec(step=60)),
        ({"mode": "Disabled", "stepTimeoutSeconds": 60}, HangSpec(enabled=False, step=60)),
    ],
)
def test_hang_detection_has_defaults_where_it_is_given(given: Any, hang: HangSpec) -> None:
    assert parse_spec({**SMALLEST, "hangDetection": given}).hang == hang
    assert parse_spec(SMALLEST).hang is None


def test_tight_hang_deadlines_are_asked_for() -> None:
    assert parse_spec({**SMALLEST, "hangDetection": {"minStepTimeoutSeconds": 2}}).hang == HangSpec(min_step=2)


@pytest.mark.parametrize(
    "given",
    [
        {"stepTimeoutSeconds": "soon"},
        {"stepTimeoutSeconds": 0},
        {"minStepTimeoutSeconds": 0},
        {"mode": "Off"},
        {"dataTimeoutSeconds": 0},
        {"action": "Ignore"},
        7,
    ],
)
def test_bad_hang_detection_is_named(given: Any) -> None:
    with pytest.raises(UnreadableError, match=r"spec\.hangDetection"):
        parse_spec({**SMALLEST, "hangDetection": given})


def test_what_is_done_about_a_hang_is_a_rule_behind_all_others() -> None:
    own = {"name": "own", "action": "FailJob", "onHang": True}
    spec = parse_spec({**SMALLEST, "recovery": {"rules": [own]}, "hangDetection": {"action": "RestartGang"}})
    assert [(rule.name, rule.action, rule.hang) for rule in spec.rules] == [
        ("own", "FailJob", True),
        ("hangDetection", "RestartGang", True),
    ]
    assert parse_spec({**SMALLEST, "hangDetection": {"action": "InPlace"}}).rules == ()


def test_the_object_store_is_read_with_its_units() -> None:
    given = {"url": "s3://b/p/", "secretRef": {"name": "w"}, "intervalSeconds": 900, "maxBytesPerSecond": "100Mi"}
    store = parse_spec({**SMALLEST, "checkpoint": {"object": given}}).checkpoint.object_store
    assert store == ObjectTier(url="s3://b/p", secret_name="w", interval_seconds=900, bytes_per_second=100 << 20)
    assert parse_spec(SMALLEST).checkpoint.object_store is None
