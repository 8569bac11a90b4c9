"""The field `accounting` of the launcher's status as metrics. A malformed field has no sample."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from holdfast_sidecar.metrics import families
from holdfast_sidecar.metrics.families import entries, gauge, label

_PRODUCTIVE = "productive"
_COUNTERS = {
    "wallSeconds": ("holdfast_rank_seconds", "Wall time of all rank places of this launcher"),
    "standbySeconds": ("holdfast_standby_seconds", "Seconds of processes on standby for a rank"),
    "steps": ("holdfast_training_steps", "Completed steps, including steps that were computed again"),
    "lostSteps": ("holdfast_training_lost_steps", "Completed steps that were lost"),
}
_MAX_RECOVERIES = 64


def metrics(accounting: object) -> Iterator[Metric]:
    """Yield the counters of one launcher. They start at 0 with each launcher."""
    if not isinstance(accounting, Mapping):
        return
    for key, (name, text) in _COUNTERS.items():
        if (value := _number(accounting.get(key))) is not None:
            yield CounterMetricFamily(name, text, value=value)
    if (value := _number(accounting.get("mtbfSeconds"))) is not None:
        yield gauge("holdfast_mtbf_estimate_seconds", "Estimated seconds between failures", value)
    yield from _seconds(accounting)
    yield _activities(accounting.get("activities"))
    yield from _recoveries(accounting.get("recoveries"))


def _seconds(accounting: Mapping[str, Any]) -> Iterator[Metric]:
    seconds = accounting.get("seconds")
    if not isinstance(seconds, Mapping):
        return
    badput = CounterMetricFamily(
        "holdfast_badput_seconds", "Seconds of rank places that were not productive, by cause", labels=["cause"]
    )
    known = {label(cause): count for cause, value in seconds.items() if (count := _number(value)) is not None}
    for cause in sorted(known.keys() - {_PRODUCTIVE}):
        badput.add_metric([cause], known[cause])
    yield badput
    productive = _number(seconds.get(_PRODUCTIVE))
    if productive is not None:
        text = "Seconds of rank places in steps that were kept"
        yield CounterMetricFamily("holdfast_productive_seconds", text, value=productive)


def _activities(activities: object) -> Metric:
    family = CounterMetricFamily(
        "holdfast_training_activity_seconds", "Seconds of ranks in a world, by activity", labels=["activity"]
    )
    for activity, value in entries(activities)[:_MAX_RECOVERIES]:
        if (seconds := _number(value)) is not None:
            family.add_metric([label(activity)], seconds)
    return family


def _recoveries(recoveries: object) -> Iterator[Metric]:
    family = HistogramMetricFamily(
        "holdfast_recovery_seconds",
        "Duration of recoveries, by phase and cause",
        labels=["phase", "cause"],
    )
    found = [_histogram(one) for one in recoveries[:_MAX_RECOVERIES]] if isinstance(recoveries, list) else []
    once = {tuple(sample[0]): sample for sample in found if sample is not None}
    for labels, buckets, total in once.values():
        family.add_metric(labels, buckets, total)
    yield family


def _histogram(recovery: object) -> tuple[list[str], list[tuple[str, float]], float] | None:
    """Return labels, cumulative buckets and sum, or None if the value is not a histogram."""
    if not isinstance(recovery, Mapping):
        return None
    count, total = _number(recovery.get("count")), _number(recovery.get("sum"))
    known = recovery.get("buckets")
    if count is None or total is None or not isinstance(known, list):
        return None
    buckets: list[tuple[str, float]] = []
    for bucket in known[:_MAX_RECOVERIES]:
        pair = [_number(part) for part in bucket] if isinstance(bucket, list) else []
        if len(pair) != 2 or pair[0] is None or pair[1] is None:
            return None
        buckets.append((str(pair[0]), pair[1]))
    labels = [label(recovery.get("phase")), label(recovery.get("cause"))]
    return labels, [*buckets, ("+Inf", count)], total


def _number(value: object) -> float | None:
    """Return a finite number that is not negative."""
    known = families.number(value)
    return known if known is not None and known >= 0 else None
