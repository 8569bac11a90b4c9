"""What events tell of pods that do not start: volumes that cannot be mounted, an image that is being pulled.

Each question is a call of its own, since the API server selects events of one object only. Invariant: of one job at
most ``ASKED`` questions are asked within ``EVERY``, however many of its pods wait and however often it is looked at;
all of its pods get their turn, and of each the last answer is kept meanwhile.
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
    """Of one pod: its warnings (reason, note), and the kubelet's word that it pulls an image if that was the last."""

    warnings: tuple[tuple[str, str], ...] = ()
    pulling: str = ""


_NOTHING = PodEventSummary()


class PodEvents:
    """Asks and remembers. A job is looked at by one thread at a time, different jobs by several."""

    def __init__(self, ask: Callable[[str, str], Iterable[Json]]) -> None:
        self._ask = ask
        self._jobs: dict[str, dict[str, tuple[datetime, PodEventSummary]]] = {}

    def of(self, job_uid: str, namespace: str, uids: Collection[str], now: datetime) -> Mapping[str, PodEventSummary]:
        """What is known of these pods of a job; of those asked about earlier and not now nothing is kept."""
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
