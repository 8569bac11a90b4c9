"""The thread that holds the Lease or waits for it. ``lease.decide`` decides."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from holdfast_operator.api.times import format_time
from holdfast_operator.cluster.client import Cluster
from holdfast_operator.errors import ClusterError, ConflictError, NotFoundError
from holdfast_operator.leadership.lease import (
    Lease,
    LeaseTimings,
    LeaseView,
    Step,
    body_of,
    decide,
    given_back,
    held,
    leads,
    lease_of,
    pause_seconds,
    seen,
)
from holdfast_operator.runtime.clock import uptime

logger = logging.getLogger(__name__)


class LeaseStore(Protocol):
    """All operations of this package on its own Lease."""

    def read(self) -> Lease | None: ...

    def write(self, lease: Lease) -> Lease:
        """Replace the version that it names, or create it without one, and return the stored Lease.

        Raises ``ConflictError`` if another process was faster.
        """


class ClusterLease:
    """``LeaseStore`` in one namespace. ``cluster`` must not repeat a call, because its time is bounded."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace

    def read(self) -> Lease | None:
        body = self._cluster.own_lease(self._namespace)
        return lease_of(body) if body is not None else None

    def write(self, lease: Lease) -> Lease:
        return lease_of(self._cluster.write_own_lease(body_of(lease, self._namespace)))


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """The reactions of a process to its own role. ``ended`` does not return."""

    elected: Callable[[], None]
    ended: Callable[[str], None]
    follows: Callable[[str | None], None]
    """Another process leads, at this address if known."""


class Elector:
    """One per process. ``url`` is where agents reach this process."""

    def __init__(
        self,
        store: LeaseStore,
        calls: Callbacks,
        *,
        me: str,
        url: str,
        terms: LeaseTimings,
        now: Callable[[], datetime],
        clock: Callable[[], float] = uptime,
    ) -> None:
        self._store = store
        self._calls = calls
        self._me, self._url = me, url
        self._terms = terms
        self._now = now
        self._clock = clock
        self._sight = LeaseView()
        self._outdated = False
        self._said = ""
        self._unanswered = False  # the last call about the Lease failed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    def look(self) -> None:
        """Read the Lease before ``start``, so that the time until then counts as time without a renewal.

        A failed read is repeated later.
        """
        try:
            self._sight = seen(self._sight, self._store.read(), self._clock())
        except ClusterError as error:
            logger.info("the Lease is looked at later: %s", error)

    def start(self) -> None:
        """Start to request the Lease."""
        self._thread.start()

    def stop(self, *, give_back: bool) -> None:
        """End the thread. With ``give_back``, release the Lease, because this process no longer acts."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(sum(self._terms.call_seconds) + 1.0)
        if give_back and not self._thread.is_alive() and self.leads():
            self._give_back()

    def alive(self) -> bool:
        """Return whether the thread runs, or has not started."""
        return self._thread.ident is None or self._thread.is_alive()

    def leads(self) -> bool:
        """Return whether this process may act now."""
        return leads(self._sight, self._clock(), self._terms)

    def round(self) -> float:
        """Read, decide, write. Failed requests are repeated in the next round. Return the wait until then."""
        try:
            if self._must_look():
                self._sight, self._outdated = seen(self._sight, self._store.read(), self._clock()), False
            self._step()
            self._unanswered = False
        except (ConflictError, NotFoundError):
            self._outdated = True
        except ClusterError as error:
            self._unanswered = True
            self._say(logging.WARNING, f"the Lease cannot be read or written: {error}")
        return pause_seconds(self._sight, self._clock(), self._terms)

    def _must_look(self) -> bool:
        """Return whether to read the Lease. A leader whose time is over ends without a read, which may hang."""
        return self._sight.renewed_at is None or (self._outdated and self.leads())

    def _run(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(self.round())

    def _step(self) -> None:
        decision = decide(self._sight, self._clock(), self._me, self._terms)
        match decision.step:
            case Step.TAKE:
                self._write()
                self._say(logging.INFO, f"this process leads: {decision.why}")
                self._calls.elected()
            case Step.RENEW:
                self._write()
                if self._unanswered:
                    self._say(logging.INFO, "the Lease is renewed")
            case Step.WAIT:
                self._say(logging.INFO, f"this process is on standby: {decision.why}")
                self._calls.follows(self._sight.lease.url or None if self._sight.lease is not None else None)
            case Step.END:
                self._stop.set()
                self._sight = replace(self._sight, renewed_at=None)
                self._calls.ended(decision.why)

    def _write(self) -> None:
        # The time before the call: others may count from the moment when the API server accepted it.
        asked = self._clock()
        wanted = held(self._sight.lease, me=self._me, url=self._url, at=format_time(self._now()), terms=self._terms)
        self._sight = LeaseView(lease=self._store.write(wanted), since=asked, renewed_at=asked)

    def _give_back(self) -> None:
        lease = self._sight.lease
        self._sight = replace(self._sight, renewed_at=None)
        if lease is None:
            return
        try:
            self._store.write(given_back(lease, at=format_time(self._now())))
            logger.info("the Lease is given back")
        except ClusterError as error:
            logger.warning("the Lease was not given back, it ends by itself: %s", error)

    def _say(self, level: int, words: str) -> None:
        if words != self._said:
            logger.log(level, "%s", words)
            self._said = words
