"""The launcher's books, `accounting` of its status, as metrics. What they say strangely is left out."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

_PRODUCTIVE = "productive"
_COUNTERS = {
    "wallSeconds": ("holdfast_rank_seconds", "Seconds of all rank places of this launcher"),
    "standbySeconds": ("holdfast_standby_seconds", "Seconds of processes that stood by for a rank"),
    "steps": ("holdfast_training_steps", "Committed steps, those made again included"),
    "lostSteps": ("holdfast_lost_steps", "Committed steps that no state has any more"),
}
_MAX_RECOVERIES = 64
_MAX_LABEL = 64


def metrics(accounting: object) -> Iterator[Metric]:
    """Counters of one launcher's life; they start at 0 with each launcher."""
    if not isinstance(accounting, Mapping):
        return
    for key, (name, text) in _COUNTERS.items():
        if (value := _number(accounting.get(key))) is not None:
            yield CounterMetricFamily(name, text, value=value)
    if (value := _number(accounting.get("mtbfSeconds"))) is not None:
        yield GaugeMetricFamily("holdfast_mtbf_estimate_seconds", "Estimated seconds between failures", value=value)
    yield from _seconds(accounting)
    yield _activities(accounting.get("activities"))
    yield from _recoveries(accounting.get("recoveries"))


def _seconds(accounting: Mapping[str, Any]) -> Iterator[Metric]:
    seconds = accounting.get("seconds")
    if not isinstance(seconds, Mapping):
        return
    badput = CounterMetricFamily(
        "holdfast_badput_seconds", "Seconds of rank places that brought no step forward, by cause", labels=["cause"]
    )
    known = {_label(cause): number for cause, value in seconds.items() if (number := _number(value)) is not None}
    for cause in sorted(known.keys() - {_PRODUCTIVE}):
        badput.add_metric([cause], known[cause])
    yield badput
    productive = _number(seconds.get(_PRODUCTIVE))
    if productive is None:
        return
    yield CounterMetricFamily("holdfast_productive_seconds", "Seconds that went into kept steps", value=productive)
    wall, pending = _number(accounting.get("wallSeconds")), _number(accounting.get("pendingSeconds"))
    if wall is not None and pending is not None and wall - pending > 0:
        ratio = min(1.0, productive / (wall - pending))
        yield GaugeMetricFamily("holdfast_goodput_ratio", "Productive seconds over all that are told", value=ratio)


def _activities(activities: object) -> Metric:
    family = CounterMetricFamily(
        "holdfast_activity_seconds", "Seconds of ranks in a world by what they do", labels=["activity"]
    )
    known = activities if isinstance(activities, Mapping) else {}
    for activity, value in list(known.items())[:_MAX_RECOVERIES]:
        if (seconds := _number(value)) is not None:
            family.add_metric([_label(activity)], seconds)
    return family


def _recoveries(recoveries: object) -> Iterator[Metric]:
    family = HistogramMetricFamily(
        "holdfast_recovery_seconds",
        "Recoveries from the last progress to the next step, by phase and cause",
        labels=["phase", "cause"],
    )
    found = [_histogram(one) for one in recoveries[:_MAX_RECOVERIES]] if isinstance(recoveries, list) else []
    once = {tuple(sample[0]): sample for sample in found if sample is not None}
    for labels, buckets, total in once.values():
        family.add_metric(labels, buckets, total)
    yield family


def _histogram(recovery: object) -> tuple[list[str], list[tuple[str, float]], float] | None:
    """Labels, cumulative buckets and sum; None of what is no histogram."""
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
    labels = [_label(recovery.get("phase")), _label(recovery.get("cause"))]
    return labels, [*buckets, ("+Inf", count)], total


def _number(value: object) -> float | None:
    """A finite, non-negative number; JSON's booleans are none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
        return None
    return float(value)


def _label(text: object) -> str:
    """A label that any scraper takes, whatever the launcher wrote."""
    return str(text)[:_MAX_LABEL].encode(errors="replace").decode()
