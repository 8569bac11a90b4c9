"""From a source's notice to the launcher: the touch-file, written once for each notice.

Invariant: no request for a drain is ever lost from the touch-file by what the sidecar writes.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import ContractError, MalformedError, SidecarError
from holdfast_sidecar.interruptions.source import Source
from holdfast_sidecar.protocol.document import Document, Notice, dump_document, parse_document, parse_time
from holdfast_sidecar.run_dir.files import create_atomically, read_small, stamp, write_atomically
from holdfast_sidecar.runtime.backoff import backoff
from holdfast_sidecar.runtime.clock import Clock
from holdfast_sidecar.runtime.logs import Transitions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What the touch-file is to hold, and why."""

    request: Document
    reason: str


def merge_requests(existing: bytes, new: Document) -> Merge:
    """Join a new request with one that the launcher has not taken yet.

    One commit answers both, so they become one request: it drains if either does, by the earlier deadline. It keeps
    the name of the one that drains, else of the existing one; `supersedes` lists the other's id.
    """
    if not existing.strip():
        return Merge(request=new, reason="a request made by hand has no content to keep")
    try:
        old = parse_document(existing, c.TOUCH_FILE)
    except ContractError as error:
        return Merge(request=new, reason=f"what was there cannot be read ({error})")
    if old.get("id") == new["id"]:
        return Merge(request=old, reason="the same request is there")
    keeps_old = old.get("drain") is True or not new["drain"]
    kept, other = (old, new) if keeps_old else (new, old)
    deadlines = [text for request in (old, new) if (text := _deadline(request)) is not None]
    request = {
        **kept,
        "drain": old.get("drain") is True or new["drain"],
        "deadline": min(deadlines, key=parse_time),
        "supersedes": [*_names(kept.get("supersedes")), *_names(other.get("supersedes")), *_names([other.get("id")])],
    }
    return Merge(request=request, reason=f"joined with {other.get('id')!r}")


def _deadline(request: Mapping[str, Any]) -> str | None:
    text = request.get("deadline")
    try:
        parse_time(text if isinstance(text, str) else "")
    except MalformedError:
        return None
    return str(text)


def _names(values: object) -> list[str]:
    return [name for name in values if isinstance(name, str)] if isinstance(values, list) else []


class NoticeLedger:
    """The notices that were passed on, kept in the run directory so that a restarted sidecar passes none on twice."""

    def __init__(self, run_dir: Path) -> None:
        self._touch = run_dir / c.TOUCH_FILE
        self._ack = run_dir / c.ACK_FILE
        self._status = run_dir / c.STATUS_FILE
        self._path = run_dir / c.NOTICES_FILE
        self._lock = threading.Lock()
        self._notices: tuple[Notice, ...] = self._remembered()
        self._answered_as: dict[str, str] = {}
        """Ids of requests that were joined with another, and whose commit is acknowledged under its id."""
        self._acknowledged = stamp(self._ack)

    def notices(self) -> tuple[Notice, ...]:
        """All notices so far, oldest first."""
        with self._lock:
            return self._notices

    def committed(self, notice_id: str) -> bool:
        """Whether the launcher says that the commit which a notice asked for is made."""
        with self._lock:
            expected = self._answered_as.get(notice_id, notice_id)
        try:
            answer = parse_document(read_small(self._ack) or b"", self._ack.name)
        except (ContractError, OSError):
            return False  # none yet, or one that is not the launcher's
        return answer.get("id") == expected and answer.get("result") == c.ACK_COMMITTED

    def acknowledged(self) -> bool:
        """Whether the launcher has acknowledged a request since this was last asked. For one thread."""
        before, self._acknowledged = self._acknowledged, stamp(self._ack)
        return self._acknowledged not in (None, before)

    def pass_on(self, notice: Notice) -> bool:
        """Write the touch-file and remember the notice; False when it was passed on before.

        The file comes first: a sidecar killed between the two looks for the notice's traces before it writes again.
        """
        with self._lock:
            if any(known.id == notice.id for known in self._notices):
                return False
            if notice.id not in self._traces():
                self._request(notice)
            self._notices = (*self._notices, notice)[-c.MAX_NOTICES :]
            entries = [known.as_report() for known in self._notices]
            write_atomically(self._path, dump_document({"version": c.VERSION, "notices": entries}))
        return True

    def _request(self, notice: Notice) -> None:
        request = notice.as_request()
        _log.warning("%s: %s (%s), deadline %s", notice.source, notice.reason, notice.id, notice.deadline.isoformat())
        while not create_atomically(self._touch, dump_document(request)):
            try:
                existing = read_small(self._touch)
            except (ContractError, OSError) as error:
                self._replace_unread(request, str(error))
                return
            if existing is not None:  # else the launcher took it just now
                merge = merge_requests(existing, request)
                write_atomically(self._touch, dump_document(merge.request))
                kept = str(merge.request["id"])
                self._answered_as.update(dict.fromkeys(_names(merge.request.get("supersedes")), kept))
                _log.warning("an emergency checkpoint was already requested: %s", merge.reason)
                return

    def _replace_unread(self, request: Document, why: str) -> None:
        """A request of another user's waits, which the launcher may be able to read: only a drain may replace it,
        as it asks for all that any request can ask for."""
        outcome = "replaced by a drain" if request["drain"] else "left, as it asks for a checkpoint too"
        _log.warning("the waiting %s cannot be read (%s): %s", self._touch.name, why, outcome)
        if request["drain"]:
            write_atomically(self._touch, dump_document(request))

    def _traces(self) -> set[str]:
        """Ids that the touch-file, its acknowledgement or the launcher's status already name."""
        found: set[str] = set()
        for path in (self._touch, self._ack, self._status):
            try:
                document = parse_document(read_small(path) or b"", path.name)
            except (ContractError, OSError):
                continue  # empty, made by hand, absent or foreign: no trace of ours
            told = document.get("notices")
            entries = [entry for entry in told if isinstance(entry, dict)] if isinstance(told, list) else []
            found.update(_names([entry.get("id") for entry in [document, *entries]]))
            found.update(_names(document.get("supersedes")))
        return found

    def _remembered(self) -> tuple[Notice, ...]:
        try:
            data = read_small(self._path)
            entries = [] if data is None else parse_document(data, self._path.name)["notices"]
            return tuple(Notice.from_report(entry) for entry in entries)
        except (ContractError, KeyError, TypeError, OSError) as error:
            _log.error("%s is not ours and starts anew: %s", self._path.name, error)
            return ()


class InterruptionPoller:
    """Polls one source, at a pace that its answers set."""

    def __init__(
        self,
        source: Source,
        ledger: NoticeLedger,
        clock: Clock,
        uniform: Callable[[float, float], float],
        *,
        on_notice: Callable[[Notice], None] = lambda _: None,
        on_error: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._ledger = ledger
        self._clock = clock
        self._uniform = uniform
        self._on_notice = on_notice
        self._on_error = on_error
        self._failures = 0
        self._state = Transitions(_log)

    def tick(self) -> float:
        """Poll once; returns the seconds until the next poll. The pause counts from the beginning of this one."""
        began = self._clock.monotonic()
        try:
            for notice in self._source.poll(self._clock.now()):
                if self._ledger.pass_on(notice):
                    self._on_notice(notice)
        except Exception as error:  # noqa: BLE001 - what nobody thought of costs this source, not reports and the others
            return self._failed(error)
        self._failures = 0
        self._state(logging.INFO, "answers", f"{self._source.name}: the source of notices answers")
        pause = self._uniform(c.SOURCE_POLL_SECONDS / 2, c.SOURCE_POLL_SECONDS)
        return max(0.0, pause - (self._clock.monotonic() - began))

    def _failed(self, error: Exception) -> float:
        self._failures += 1
        self._on_error(self._source.name)
        known = self._source.known
        longest = c.SOURCE_BACKOFF_KNOWN_SECONDS if known else c.SOURCE_BACKOFF_ABSENT_SECONDS
        new = self._state(
            logging.WARNING if known else logging.INFO,
            "fails" if known else "absent",
            f"{self._source.name}: {'no notices for now' if known else 'no such service here'} ({error}); "
            f"asking again, at least every {longest:.0f} s",
        )
        if new and not isinstance(error, SidecarError | OSError):
            _log.error("%s: a fault of the sidecar's own", self._source.name, exc_info=error)
        return backoff(self._failures, first=c.SOURCE_POLL_SECONDS / 2, longest=longest, uniform=self._uniform)
