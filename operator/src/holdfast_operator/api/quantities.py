"""Kubernetes quantities, and the requests of a pod. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from holdfast_operator.api.json import Json

Amounts = dict[str, Decimal]

SUFFIX = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}
# The API server accepts no larger quantity, and rounds up to the smallest one.
_LARGEST, _SMALLEST = Decimal(2**63 - 1), SUFFIX["n"]
# Longer quantities are left to the scheduler: templates of other jobs must not slow down this pass.
_WEIGHED_TEXT = 64


def quantity(text: Any) -> Decimal:
    """Parse a Kubernetes quantity. Malformed and negative ones count as 0."""
    value = str(text)
    if len(value) > _WEIGHED_TEXT:
        return Decimal(0)
    for length in (2, 1, 0):
        number, suffix = (value[:-length], value[-length:]) if length else (value, "")
        if suffix not in SUFFIX:
            continue
        try:
            found = Decimal(number)
        except InvalidOperation:
            continue
        return _bounded(found, suffix)
    return Decimal(0)


def whole(value: Any) -> int:
    """Parse a quantity, for example of bytes, as an integer, rounded up. A malformed one counts as 0."""
    return math.ceil(quantity(value))


def _bounded(number: Decimal, suffix: str) -> Decimal:
    if not number.is_finite() or number <= 0:
        return Decimal(0)
    if number.adjusted() > _LARGEST.adjusted():
        return _LARGEST
    if number.adjusted() < -_LARGEST.adjusted():
        return _SMALLEST
    return min(_LARGEST, max(_SMALLEST, number * SUFFIX[suffix]))


def requests(pod_spec: Json) -> Amounts:
    """Return a pod's requests: of containers and native sidecars, or of its largest init container if higher."""
    running: Amounts = {"pods": Decimal(1)}
    for container in pod_spec.get("containers") or ():
        add(running, _container(container))
    peak: Amounts = {}
    sidecars: Amounts = {}
    for container in pod_spec.get("initContainers") or ():
        amounts = _container(container)
        if container.get("restartPolicy") == "Always":
            add(sidecars, amounts)
            amounts = {}
        add(amounts, sidecars)
        peak = _most(peak, amounts)
    add(running, sidecars)
    result = _most(running, peak)
    add(result, {key: quantity(value) for key, value in (pod_spec.get("overhead") or {}).items()})
    return result


def _container(container: Json) -> Amounts:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {key: quantity(value) for key, value in asked.items()}


def add(into: Amounts, amounts: Mapping[str, Decimal], times: int = 1) -> None:
    """Add ``amounts`` to ``into``, multiplied by ``times``."""
    for key, value in amounts.items():
        into[key] = into.get(key, Decimal(0)) + value * times


def _most(one: Amounts, other: Amounts) -> Amounts:
    return {key: max(one.get(key, Decimal(0)), other.get(key, Decimal(0))) for key in one.keys() | other.keys()}
