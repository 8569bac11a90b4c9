"""The settings of node remediation: Helm's ``nodeRemediation``, read once at the start."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from holdfast_operator.api.json import Json
from holdfast_operator.api.node_mark import Mode
from holdfast_operator.errors import SettingsError

_PERCENT = re.compile(r"^(100|[1-9]?[0-9])%$")
_SECONDS_MAX = 30 * 24 * 3600


_MODES = {mode.word: mode for mode in Mode}


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """An alert and the actions that it may cause."""

    alert: str
    action: Mode
    labels: tuple[tuple[str, str], ...] = ()

    def matches(self, labels: Json) -> bool:
        """Return whether the rule covers an alert with these labels."""
        return labels.get("alertname") == self.alert and all(labels.get(key) == value for key, value in self.labels)


@dataclass(frozen=True, kw_only=True)
class NodeLimit:
    """A number of nodes, or a percentage of all, rounded up."""

    number: int
    percent: bool = False

    def of(self, nodes: int) -> int:
        """Return the number of nodes that may be away at once."""
        return -(-nodes * self.number // 100) if self.percent else self.number


@dataclass(frozen=True, kw_only=True)
class RemediationSettings:
    """All settings. ``mode`` bounds the actions of every alert."""

    mode: Mode = Mode.OBSERVE
    dry_run: bool = False
    alerts: tuple[AlertRule, ...] = ()
    node_labels: tuple[str, ...] = ("node", "kubernetes_node", "Hostname", "hostname", "instance")
    node_selector: Mapping[str, str] = field(default_factory=dict, hash=False)
    max_unavailable: NodeLimit = NodeLimit(number=10, percent=True)
    max_per_hour: int = 2
    cooldown: timedelta = timedelta(hours=1)
    release_after: timedelta | None = timedelta(minutes=10)
    drain_deadline: timedelta = timedelta(minutes=15)
    force: bool = False
    provider: str = ""
    outside_groups: bool = False
    token_file: str = ""

    def action(self, labels: Json) -> tuple[AlertRule, Mode] | None:
        """Return the first rule for an alert with these labels, and the mode that it may use here."""
        for rule in self.alerts:
            if rule.matches(labels):
                return rule, min(rule.action, self.mode)
        return None


def parse_rules(text: str, token_file: str = "") -> RemediationSettings:
    """Parse Helm's ``nodeRemediation`` as JSON; empty: only observe. Raises ``SettingsError`` with the reason."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        raise SettingsError("HOLDFAST_NODE_REMEDIATION is not JSON") from None
    if not isinstance(value, Mapping):
        raise SettingsError("HOLDFAST_NODE_REMEDIATION is no object")
    provider = str(value.get("provider", ""))
    if provider not in ("", "AWS"):
        raise SettingsError(f"nodeRemediation.provider must be AWS or empty, not {provider!r}")
    rules = RemediationSettings(
        mode=_mode(value.get("mode", "Observe"), "mode"),
        dry_run=value.get("dryRun") is True,
        alerts=tuple(_alert(item) for item in value.get("alerts") or ()),
        node_labels=tuple(map(str, value.get("nodeLabels") or RemediationSettings.node_labels)),
        node_selector={str(key): str(item) for key, item in (value.get("nodeSelector") or {}).items()},
        max_unavailable=_limit(value.get("maxUnavailable", "10%")),
        max_per_hour=_number(value, "maxPerHour", 2, 1000),
        cooldown=timedelta(seconds=_number(value, "cooldownSeconds", 3600)),
        release_after=timedelta(seconds=_number(value, "releaseAfterSeconds", 600)) or None,
        drain_deadline=timedelta(seconds=_number(value, "drainDeadlineSeconds", 900)),
        force=value.get("force") is True,
        provider=provider,
        outside_groups=value.get("terminateOutsideGroups") is True,
        token_file=token_file,
    )
    if rules.mode is Mode.REPLACE and not provider:
        raise SettingsError("nodeRemediation.mode is Replace: set nodeRemediation.provider, or choose Drain")
    return rules


def _alert(item: Any) -> AlertRule:
    if not isinstance(item, Mapping) or not item.get("alert"):
        raise SettingsError("nodeRemediation.alerts: each entry needs the name of an alert")
    labels = tuple(sorted((str(key), str(value)) for key, value in (item.get("labels") or {}).items()))
    return AlertRule(
        alert=str(item["alert"]), action=_mode(item.get("action", "Cordon"), "alerts.action"), labels=labels
    )


def _mode(value: Any, name: str) -> Mode:
    if value not in _MODES:
        raise SettingsError(f"nodeRemediation.{name} must be one of {', '.join(_MODES)}, not {value!r}")
    return _MODES[value]


def _limit(value: Any) -> NodeLimit:
    match = _PERCENT.match(str(value))
    if match is not None:
        return NodeLimit(number=int(match[1]), percent=True)
    if not str(value).isdecimal():
        raise SettingsError(f"nodeRemediation.maxUnavailable must be a number or a percentage, not {value!r}")
    return NodeLimit(number=int(str(value)))


def _number(value: Json, key: str, default: int, most: int = _SECONDS_MAX) -> int:
    found = value.get(key, default)
    # Helm passes large numbers as floats.
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= most or found % 1:
        raise SettingsError(f"nodeRemediation.{key} must be an integer from 0 to {most}, not {found!r}")
    return int(found)
