"""Build metric families from values that another process wrote. A value of the wrong type has no sample."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily

from holdfast_sidecar.errors import MalformedError
from holdfast_sidecar.protocol.document import parse_time

_MAX_LABEL: Final = 64


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """Return a gauge with one sample and no labels."""
    return GaugeMetricFamily(name, text, value=value)


def gauges(values: Mapping[str, tuple[str, object]]) -> Iterator[GaugeMetricFamily]:
    """Yield one gauge for each name → (help text, value) whose value is a number."""
    for name, (text, value) in values.items():
        if (known := number(value)) is not None:
            yield gauge(name, text, known)


def state_set(family: GaugeMetricFamily, labels: list[str], states: Iterable[str], current: Iterable[str]) -> None:
    """Add a sample for each state: 1 if it is current, otherwise 0."""
    now = set(current)
    for state in dict.fromkeys([*states, *sorted(now)]):
        family.add_metric([*labels, state], float(state in now))


def number(value: object) -> float | None:
    """Return a finite number as float. JSON's booleans are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


def timestamp(value: object) -> float | None:
    """Return the Unix time of an RFC 3339 string."""
    with contextlib.suppress(MalformedError):
        return parse_time(str(value)).timestamp()
    return None


def label(value: object) -> str:
    """Return a label value of limited length that every scraper can decode."""
    return str(value)[:_MAX_LABEL].encode(errors="replace").decode()


def entries(value: object) -> list[tuple[Any, Any]]:
    """Return the items of a JSON object, or nothing for any other value."""
    return list(value.items()) if isinstance(value, Mapping) else []
