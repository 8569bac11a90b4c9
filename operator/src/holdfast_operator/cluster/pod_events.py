"""Reads events of pods that do not start: volumes that cannot be mounted, an image that is being pulled.

Each pod needs a request, because the API server selects events of one object only. Invariant: for one job, at most
``ASKED`` requests are sent within ``EVERY``, however many of its pods wait. All its pods take turns, and the last
result for each is kept meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from holdfast_operator.api.json import Json

ASKED = 16
EVERY = timedelta(seconds=5)
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class PodEventSummary:
    """The warnings of one pod (reason, note), and the kubelet's report of an image pull if that was the last one."""

    warnings: tuple[tuple[str, str], ...] = ()
    pulling: str = ""


_NOTHING = PodEventSummary()


class PodEvents:
    """Sends the requests and keeps the results. Each job is handled by one thread at a time."""

    def __init__(self, ask: Callable[[str, str], Iterable[Json]]) -> None:
        self._ask = ask
        self._jobs: dict[str, dict[str, tuple[datetime, PodEventSummary]]] = {}

    def of(self, job_uid: str, namespace: str, uids: Collection[str], now: datetime) -> Mapping[str, PodEventSummary]:
        """Return the known events of these pods of a job. Results for its other pods are dropped."""
        before = self._jobs.get(job_uid, {})
        known = {uid: before[uid] for uid in uids if uid in before}
        if not uids:
            self._jobs.pop(job_uid, None)
            return {}
        self._jobs[job_uid] = known
        lately = sum(now - at < EVERY for at, _told in before.values())
        asked_at = {uid: known[uid][0] if uid in known else _NEVER for uid in uids}
        due = sorted((uid for uid in uids if now - asked_at[uid] >= EVERY), key=lambda uid: (asked_at[uid], uid))
        for uid in due[: max(0, ASKED - lately)]:
            known[uid] = now, _read(self._ask(namespace, uid))
        return {uid: known[uid][1] if uid in known else _NOTHING for uid in uids}

    def forget(self) -> None:
        self._jobs = {}


def _read(events: Iterable[Json]) -> PodEventSummary:
    ordered = sorted(events, key=_last_seen)
    words = [(str(event.get("reason", "")), str(event.get("message", ""))) for event in ordered]
    warnings = [word for word, event in zip(words, ordered, strict=True) if event.get("type") == "Warning"]
    return PodEventSummary(
        warnings=tuple(warnings), pulling=words[-1][1] if words and words[-1][0] == "Pulling" else ""
    )


def _last_seen(event: Json) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(time) for time in times if time), "")
