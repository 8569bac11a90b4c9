"""The membership that the operator publishes: fetched by long poll, stored in the run directory."""

import http
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import ContractError, SidecarError
from holdfast_sidecar.operator_api.client import OperatorApi, at_least, error_kind
from holdfast_sidecar.protocol.document import parse_document
from holdfast_sidecar.protocol.membership import membership_revision
from holdfast_sidecar.run_dir.files import read_small, write_atomically
from holdfast_sidecar.runtime.backoff import backoff
from holdfast_sidecar.runtime.clock import Clock
from holdfast_sidecar.runtime.logs import Transitions

_log = logging.getLogger(__name__)


class Membership:
    """Fetches the membership by long poll. `step` belongs to one thread, `expect` to the reporter's.

    Whatever document the operator serves is stored, byte for byte, also one with a lower revision than the stored one
    (its cluster was restored from a backup). Answers to reports name the operator's revision. If that differs from
    the poll's cursor for long, the poll restarts at the operator's revision.
    """

    def __init__(
        self,
        api: OperatorApi,
        run_dir: Path,
        clock: Clock,
        jitter: Callable[[float, float], float],
        *,
        abort: Callable[[], None] = lambda: None,
        on_stored: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._api = api
        self._path = run_dir / c.MEMBERSHIP_FILE
        self._clock = clock
        self._jitter = jitter
        self._abort = abort
        self._on_stored = on_stored
        self._lock = threading.Lock()
        self._mismatch: tuple[int, float] | None = None
        self._nudged = False
        self._failures = 0
        self._contact = Transitions(_log)
        self._stored: bytes | None = None
        self._cursor = self._found()

    def step(self) -> float:
        """Poll once and return the seconds to wait before the next poll."""
        with self._lock:
            cursor, self._nudged = self._cursor, False
        try:
            response = self._api.send(
                "GET", f"{c.MEMBERSHIP_PATH}?after={cursor}", body=None, timeout=c.MEMBERSHIP_TIMEOUT_SECONDS
            )
            if response.status == http.HTTPStatus.OK:
                self._store(response.body)
        except (SidecarError, OSError) as error:
            return self._failed(error)
        self._failures = 0
        self._contact(logging.INFO, "ok", "the operator serves the membership")
        return 0.0

    def expect(self, revision: int) -> bool:
        """Take the operator's revision from a report's answer, and end a long poll that waits for another one.

        Return False while the two differ.
        """
        with self._lock:
            now = self._clock.monotonic()
            if revision == self._cursor:
                self._mismatch = None
                return True
            if self._mismatch is None or self._mismatch[0] != revision:
                self._mismatch = (revision, now)
            if now - self._mismatch[1] < c.REVISION_MISMATCH_SECONDS:
                return False
            if revision < self._cursor:
                _log.warning("the operator's revision fell from %d to %d; following it", self._cursor, revision)
                self._cursor = max(revision - 1, 0)
            self._mismatch, self._nudged = None, True
        self._abort()
        return False

    def _store(self, data: bytes) -> None:
        revision = membership_revision(data)
        if data != self._stored:
            write_atomically(self._path, data)
            self._stored = data
            _log.info("membership has revision %d, generation %s", revision, parse_document(data, "")["generation"])
        with self._lock:
            self._cursor = revision
        self._on_stored(revision)

    def _failed(self, error: Exception) -> float:
        with self._lock:
            if self._nudged:
                return 0.0
        self._failures += 1
        self._contact(logging.WARNING, error_kind(error), f"no membership from the operator: {error}")
        pause = backoff(
            self._failures, first=c.BACKOFF_FIRST_SECONDS, longest=c.BACKOFF_MAX_SECONDS, jitter=self._jitter
        )
        return at_least(error, pause)

    def _found(self) -> int:
        """Return the revision that an earlier sidecar of this pod stored, or 0."""
        try:
            data = read_small(self._path)
            revision = 0 if data is None else membership_revision(data)
        except (ContractError, OSError) as error:
            _log.error("the stored membership is fetched again: %s", error)
            return 0
        self._stored = data
        if revision:
            self._on_stored(revision)
        return revision
