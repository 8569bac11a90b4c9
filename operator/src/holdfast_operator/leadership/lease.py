"""Leader election: one Lease, held by one process at a time. Pure.

Invariant: a leader has ended before another process may take its Lease. It ends ``give_up_seconds`` after it sent the
last accepted renewal. None of its calls starts later or takes longer than ``call_seconds``. A process takes a Lease
only after it has seen the Lease unchanged for ``lease_seconds``.

Clocks of two machines are never compared: the times in a Lease are for administrators. Each process measures how long
it has seen the Lease unchanged, on a clock that does not jump.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json


@dataclass(frozen=True, kw_only=True)
class LeaseTimings:
    """The duration of a Lease, and derived times."""

    lease_seconds: int = c.LEASE_SECONDS

    @property
    def give_up_seconds(self) -> float:
        """A leader that could not renew for this long ends."""
        return self.lease_seconds * 2 / 3

    @property
    def call_seconds(self) -> tuple[float, float]:
        """Time limit for the connection and for the answer of one call.

        Both together are the time that is left after the end.
        """
        return (self.lease_seconds * 2 / 15, self.lease_seconds * 3 / 15)

    @property
    def round_seconds(self) -> float:
        """The interval between two reads of the Lease."""
        return self.lease_seconds * 2 / 15


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The Lease in the cluster. ``holder`` is empty after a release."""

    holder: str
    url: str = ""
    seconds: int = c.LEASE_SECONDS
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class LeaseView:
    """The knowledge of one process.

    ``since``: when it first saw the present Lease. ``renewed_at``: when it sent its last accepted renewal; None while
    it does not lead. Both by its own clock.
    """

    lease: Lease | None = None
    since: float = 0.0
    renewed_at: float | None = None


class Step(Enum):
    """The next step of a process."""

    TAKE = "take the Lease"
    RENEW = "renew it"
    WAIT = "wait"
    END = "end"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A step, and the reason for the log."""

    step: Step
    why: str


def decide(sight: LeaseView, now: float, me: str, terms: LeaseTimings) -> Decision:
    """Return the next step of a process."""
    if sight.renewed_at is not None:
        return _as_leader(sight, now, me, terms)
    lease = sight.lease
    if lease is None:
        return Decision(step=Step.TAKE, why="there was no Lease")
    if not lease.holder:
        return Decision(step=Step.TAKE, why="the Lease had been given back")
    if lease.holder == me:
        return Decision(step=Step.TAKE, why="the Lease was ours before the restart")
    if now - sight.since > lease.seconds:
        return Decision(step=Step.TAKE, why=f"{lease.holder} has not renewed the Lease for {lease.seconds} s")
    return Decision(step=Step.WAIT, why=f"{lease.holder} leads")


def _as_leader(sight: LeaseView, now: float, me: str, terms: LeaseTimings) -> Decision:
    if not leads(sight, now, terms):
        return Decision(step=Step.END, why=f"the Lease could not be renewed for {terms.give_up_seconds:.0f} s")
    if sight.lease is None:
        return Decision(step=Step.END, why="the Lease was deleted")
    if sight.lease.holder != me:
        return Decision(step=Step.END, why=f"{sight.lease.holder or 'nobody'} holds the Lease now")
    return Decision(step=Step.RENEW, why="we lead")


def leads(sight: LeaseView, now: float, terms: LeaseTimings) -> bool:
    """Return whether this process may act. False also for a process that was suspended past the end of its Lease."""
    return sight.renewed_at is not None and now < sight.renewed_at + terms.give_up_seconds


def pause_seconds(sight: LeaseView, now: float, terms: LeaseTimings) -> float:
    """Return the wait until the next read.

    A leader wakes when it must end and not a round later, because another process may lead by then.
    """
    if sight.renewed_at is None:
        return terms.round_seconds
    return min(terms.round_seconds, max(0.0, sight.renewed_at + terms.give_up_seconds - now))


def seen(before: LeaseView, lease: Lease | None, now: float) -> LeaseView:
    """Return the knowledge after a read."""
    same = lease is not None and before.lease is not None and _content(lease) == _content(before.lease)
    return LeaseView(lease=lease, since=before.since if same else now, renewed_at=before.renewed_at)


def _content(lease: Lease) -> tuple[str, str, int]:
    return (lease.holder, lease.renewed, lease.transitions)


def held(before: Lease | None, *, me: str, url: str, at: str, terms: LeaseTimings) -> Lease:
    """Return the Lease to write in order to take or renew it."""
    same = before is not None and before.holder == me
    return Lease(
        holder=me,
        url=url,
        seconds=terms.lease_seconds,
        acquired=before.acquired if before is not None and same else at,
        renewed=at,
        transitions=0 if before is None else before.transitions + (not same),
        version=before.version if before is not None else "",
    )


def given_back(lease: Lease, *, at: str) -> Lease:
    """Return the Lease to write at a clean end, so that the next leader need not wait."""
    return Lease(
        holder="",
        seconds=1,
        acquired=lease.acquired,
        renewed=at,
        transitions=lease.transitions,
        version=lease.version,
    )


def lease_of(body: Json) -> Lease:
    """Parse the API's JSON. Any field may be missing after a manual edit."""
    meta, spec = body.get("metadata") or {}, body.get("spec") or {}
    return Lease(
        holder=str(spec.get("holderIdentity") or ""),
        url=str((meta.get("annotations") or {}).get(c.ANNOTATION_AGENTS_URL) or ""),
        seconds=max(1, int(spec.get("leaseDurationSeconds") or c.LEASE_SECONDS)),
        acquired=str(spec.get("acquireTime") or ""),
        renewed=str(spec.get("renewTime") or ""),
        transitions=int(spec.get("leaseTransitions") or 0),
        version=str(meta.get("resourceVersion") or ""),
    )


def body_of(lease: Lease, namespace: str) -> dict[str, Any]:
    """Return the object. With a version it replaces exactly that version; without one it is new."""
    meta: dict[str, Any] = {
        "name": c.LEASE_NAME,
        "namespace": namespace,
        "labels": {c.LABEL_APP_MANAGED_BY: c.MANAGED_BY},
        "annotations": {c.ANNOTATION_AGENTS_URL: lease.url},
    }
    if lease.version:
        meta["resourceVersion"] = lease.version
    spec = {
        "holderIdentity": lease.holder,
        "leaseDurationSeconds": lease.seconds,
        "acquireTime": lease.acquired or None,
        "renewTime": lease.renewed or None,
        "leaseTransitions": lease.transitions,
    }
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
