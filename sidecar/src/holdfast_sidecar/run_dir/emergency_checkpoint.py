"""Forwards notices to the launcher: the touch-file, written once per notice.

Invariant: nothing that the sidecar writes removes a request for a drain from the touch-file.
"""

import logging
import threading
from pathlib import Path

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import ContractError
from holdfast_sidecar.protocol.document import Document, dump_document, parse_document
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.run_dir.checkpoint_request import merge, request_ids
from holdfast_sidecar.run_dir.files import create_atomically, read_small, stamp, write_atomically

_log = logging.getLogger(__name__)


class NoticeLedger:
    """The forwarded notices, stored in the run directory, so that a restarted sidecar forwards none twice."""

    def __init__(self, run_dir: Path) -> None:
        self._touch = run_dir / c.TOUCH_FILE
        self._ack = run_dir / c.ACK_FILE
        self._status = run_dir / c.STATUS_FILE
        self._path = run_dir / c.NOTICES_FILE
        self._lock = threading.Lock()
        self._notices: tuple[Notice, ...] = self._remembered()
        self._answered_as: dict[str, str] = {}
        """IDs of requests that were joined with another, under whose ID their checkpoint is acknowledged."""
        self._acknowledged = stamp(self._ack)

    def notices(self) -> tuple[Notice, ...]:
        """All notices so far, oldest first."""
        with self._lock:
            return self._notices

    def committed(self, notice_id: str) -> bool:
        """Whether the launcher has acknowledged the checkpoint that a notice requested."""
        with self._lock:
            expected = self._answered_as.get(notice_id, notice_id)
        try:
            answer = parse_document(read_small(self._ack) or b"", self._ack.name)
        except (ContractError, OSError):
            return False  # none yet, or one that is not the launcher's
        return answer.get("id") == expected and answer.get("result") == c.ACK_COMMITTED

    def acknowledged(self) -> bool:
        """Whether the launcher has acknowledged a request since the last call. For one thread."""
        before, self._acknowledged = self._acknowledged, stamp(self._ack)
        return self._acknowledged not in (None, before)

    def publish(self, notice: Notice) -> bool:
        """Write the touch-file and store the notice.

        Return False if it was forwarded before. The file is written first: a sidecar that was killed in between looks
        for traces of the notice before it writes again.
        """
        with self._lock:
            if any(known.id == notice.id for known in self._notices):
                return False
            if notice.id not in self._traces():
                self._request(notice)
            self._notices = _newest((*self._notices, notice))
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
                merged = merge(existing, request)
                write_atomically(self._touch, dump_document(merged.request))
                kept = str(merged.request["id"])
                self._answered_as.update(dict.fromkeys(request_ids(merged.request.get("supersedes")), kept))
                _log.warning("an emergency checkpoint was already requested: %s", merged.reason)
                return

    def _replace_unread(self, request: Document, why: str) -> None:
        """Handle an unreadable request of another user.

        The launcher may be able to read it, so only a drain may replace it, because a drain includes every other
        request.
        """
        outcome = "replaced by a drain" if request["drain"] else "left, as it asks for a checkpoint too"
        _log.warning("the waiting %s cannot be read (%s): %s", self._touch.name, why, outcome)
        if request["drain"]:
            write_atomically(self._touch, dump_document(request))

    def _traces(self) -> set[str]:
        """Return the IDs in the touch-file, its acknowledgement and the launcher's status."""
        found: set[str] = set()
        for path in (self._touch, self._ack, self._status):
            try:
                document = parse_document(read_small(path) or b"", path.name)
            except (ContractError, OSError):
                continue  # empty, made by hand, absent or foreign: no trace of ours
            told = document.get("notices")
            entries = [entry for entry in told if isinstance(entry, dict)] if isinstance(told, list) else []
            found.update(request_ids([entry.get("id") for entry in [document, *entries]]))
            found.update(request_ids(document.get("supersedes")))
        return found

    def _remembered(self) -> tuple[Notice, ...]:
        try:
            data = read_small(self._path)
            entries = [] if data is None else parse_document(data, self._path.name)["notices"]
            return tuple(Notice.from_report(entry) for entry in entries)
        except (ContractError, KeyError, TypeError, OSError) as error:
            _log.error("%s was not written by this sidecar and is recreated: %s", self._path.name, error)
            return ()


def _newest(notices: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """Drop the oldest notice above the limit, and one that drains only if all do."""
    if len(notices) <= c.MAX_NOTICES:
        return notices
    dropped = next((one for one in notices if not one.drain), notices[0])
    return tuple(one for one in notices if one is not dropped)
