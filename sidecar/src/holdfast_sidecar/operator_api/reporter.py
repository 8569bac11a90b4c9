"""The operator's API for agents: reports out, membership in. The operator may be away for as long as it likes."""

import http
import ipaddress
import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import BusyError, ContractError, MalformedError, SidecarError, TransportError
from holdfast_sidecar.interruptions.poller import NoticeLedger
from holdfast_sidecar.protocol.document import (
    GpuError,
    Pod,
    Preflight,
    Report,
    membership_revision,
    parse_document,
    report_answer,
)
from holdfast_sidecar.run_dir.files import Stamp, read_small, stamp, write_atomically
from holdfast_sidecar.run_dir.launcher_status import (
    NOTHING_REPORTED,
    LauncherStatus,
    LauncherStatusWatcher,
    ReportState,
    accepted,
    failed,
    report_due,
)
from holdfast_sidecar.runtime.backoff import backoff
from holdfast_sidecar.runtime.clock import Clock
from holdfast_sidecar.runtime.http import Connection, Response, Transport
from holdfast_sidecar.runtime.logs import Transitions

_log = logging.getLogger(__name__)

REFUSALS = {
    401: "the operator does not accept this pod's token (401)",
    403: "the operator says that the token is another pod's (403)",
    404: "the operator knows no job that this pod belongs to (404)",
    413: "the report is too large for the operator (413)",
    429: "the operator says that this pod asks too often (429)",
}


class ReloadingTlsContext:
    """The CA bundle as a TLS context: a new one whenever the file has changed. Verification cannot be turned off."""

    def __init__(self, ca_file: Path) -> None:
        self._path = ca_file
        self._stamp: Stamp | None = None
        self._context: ssl.SSLContext | None = None

    def __call__(self) -> ssl.SSLContext:
        found = stamp(self._path)
        if self._context is None or found != self._stamp:
            try:
                self._context = ssl.create_default_context(cafile=str(self._path))
            except OSError as error:
                raise TransportError(f"the CA bundle {self._path} cannot be used: {error}") from error
            self._context.minimum_version = ssl.TLSVersion.TLSv1_2
            self._stamp = found
        return self._context


class OperatorApi:
    """One connection to the operator, with the pod's token on each request. The token rotates, so it is read anew
    each time; it is never logged.

    A standby names the leader, and `turn` leads there; a failure there leads back to the operator's own name."""

    def __init__(
        self, transport: Transport, token_file: Path, turn: Callable[[tuple[str, int] | None], bool] = lambda _: False
    ) -> None:
        self._transport = transport
        self._token_file = token_file
        self._turn = turn

    def send(self, method: str, path: str, *, body: bytes | None, timeout: float) -> Response:
        """The operator's answer if it is 200 or 204, else `TransportError` with one line that says what is wrong."""
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            response = self._transport.request(method, path, headers=headers, body=body, timeout=timeout)
        except TransportError:
            if not self._turn(None):
                raise
            response = self._transport.request(method, path, headers=headers, body=body, timeout=timeout)
        if response.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            self._turn(_address(_leader(response)))
        if response.status == http.HTTPStatus.TOO_MANY_REQUESTS:
            raise BusyError(_refusal(response), _retry_after(response))
        if response.status not in (http.HTTPStatus.OK, http.HTTPStatus.NO_CONTENT):
            raise TransportError(_refusal(response))
        return response

    def _token(self) -> str:
        try:
            token = self._token_file.read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise TransportError(f"the token {self._token_file} cannot be read: {type(error).__name__}") from error
        if not token or not token.isprintable():
            raise TransportError(f"the token {self._token_file} is empty or damaged")
        return token


def _leader(response: Response) -> str:
    """The URL that a standby names, empty where it names none."""
    try:
        leader = parse_document(response.body, "the answer").get("leader")
    except ContractError:
        return ""
    return str(leader or "")


def _address(url: str) -> tuple[str, int] | None:
    """Where that is. Only of addresses: to look up a name could take as long as it likes."""
    try:
        parts = urlsplit(url)
        host = str(ipaddress.ip_address(parts.hostname or ""))
        return (host, parts.port or 443) if parts.scheme == "https" else None
    except ValueError:
        return None


def _retry_after(response: Response) -> float:
    """The seconds that it names, 0 where it names none."""
    text = response.headers.get("retry-after", "")
    named = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return float(min(named, c.RETRY_AFTER_MAX_SECONDS))


def _at_least(error: Exception, pause: float) -> float:
    """A pause that the operator itself asks for is kept."""
    return max(pause, error.seconds) if isinstance(error, BusyError) else pause


def _refusal(response: Response) -> str:
    if response.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        return f"the operator is not serving now (503), its leader is {(_leader(response) or 'not known')[:200]}"
    return REFUSALS.get(response.status) or f"the operator answered {response.status}{_complaint(response)}"


def _complaint(response: Response) -> str:
    """The operator's own words, where it gives any."""
    try:
        error = parse_document(response.body, "the answer").get("error")
    except ContractError:
        return ""
    return f": {error[:200]}" if isinstance(error, str) else ""


class Reporter:
    """Sends the launcher's state. `step` belongs to one thread."""

    def __init__(
        self,
        *,
        api: OperatorApi,
        pod: Pod,
        start_id: str,
        heartbeat: LauncherStatusWatcher,
        ledger: NoticeLedger,
        clock: Clock,
        uniform: Callable[[float, float], float],
        on_result: Callable[[bool], None] = lambda _: None,
        on_revision: Callable[[int], bool] = lambda _: True,
        gpu: Callable[[], Sequence[GpuError]] = lambda: (),
        preflight: Callable[[], Preflight | None] = lambda: None,
        on_answer: Callable[[Response, float, bool], None] = lambda _answer, _took, _ready: None,
    ) -> None:
        self._api = api
        self._pod = pod
        self._start_id = start_id
        self._heartbeat = heartbeat
        self._ledger = ledger
        self._clock = clock
        self._uniform = uniform
        self._on_result = on_result
        self._on_revision = on_revision
        self._gpu = gpu
        self._preflight = preflight
        self._on_answer = on_answer
        self._number = 0
        self._report_state: ReportState = NOTHING_REPORTED
        self._contact = Transitions(_log)

    def step(self) -> float:
        """Send a report if one is due; returns the seconds until the next is, if nothing changes before."""
        beat, notices = self._beat(), len(self._ledger.notices())
        due, _ = report_due(self._report_state, beat, notices)
        wait = due - self._clock.monotonic()
        if wait > 0:
            return wait
        self._send(beat, c.REPORT_TIMEOUT_SECONDS)
        return 0.0

    def last(self, api: OperatorApi, sleep: Callable[[float], object]) -> bool:
        """The last report: sent until it is taken or its time is over, unless the operator knows all of it.

        It goes over a connection of its own, since the usual one may hang."""
        self._api = api
        self._heartbeat.poll()
        beat, state = self._beat(), self._report_state
        told = (state.failures, state.sequence, state.notices) == (0, beat.sequence, len(self._ledger.notices()))
        told = told and state.significance == beat.significance
        if told and state.accepted_at is not None:
            return True
        end = self._clock.monotonic() + c.FINAL_REPORT_SECONDS
        while (left := end - self._clock.monotonic()) > 0:
            if self._send(beat, left):
                return True
            sleep(min(self._report_state.pause, max(0.0, end - self._clock.monotonic())))
        _log.error("the last report did not reach the operator; the pod's own state has to tell it")
        return False

    def _beat(self) -> LauncherStatus:
        """The newest beat; a GPU error and a check's result are as significant as what the launcher says."""
        beat, errors, preflight = self._heartbeat.current(), self._gpu(), self._preflight()
        if not errors and preflight is None:
            return beat
        return replace(beat, significance=beat.significance + repr((errors, preflight)).encode())

    def _send(self, beat: LauncherStatus, timeout: float) -> bool:
        self._number += 1
        notices = self._ledger.notices()
        report = Report(
            start_id=self._start_id,
            number=self._number,
            pod=self._pod,
            launcher=beat.status,
            launcher_silent_seconds=beat.silent_seconds(self._clock.monotonic()),
            notices=notices,
            gpu=self._gpu(),
            preflight=self._preflight(),
        )
        asked_at = self._clock.monotonic()
        try:
            answer = self._api.send("POST", c.REPORT_PATH, body=report.encode(), timeout=timeout)
            revision = report_answer(answer.body)
        except (SidecarError, ValueError, RecursionError) as error:
            pause = _at_least(error, self._pause(self._report_state.failures + 1))
            self._report_state = failed(self._report_state, self._clock.monotonic(), pause)
            self._contact(logging.WARNING, _kind(error), f"reports do not reach the operator: {error}")
            self._on_result(False)
            return False
        ready = (beat.status or {}).get("ready") is True
        self._on_answer(answer, self._clock.monotonic() - asked_at, ready)
        settled = self._on_revision(revision)
        self._report_state = accepted(beat, len(notices), self._clock.monotonic(), settled=settled)
        self._contact(logging.INFO, "ok", "reports reach the operator")
        self._on_result(True)
        return True

    def _pause(self, failures: int) -> float:
        return backoff(failures, first=c.BACKOFF_FIRST_SECONDS, longest=c.BACKOFF_MAX_SECONDS, uniform=self._uniform)


class Membership:
    """Brings the membership by long poll. `step` belongs to one thread, `expect` to the reporter's.

    The operator's publication decides: whatever document it serves is stored, byte for byte, also one with a lower
    revision than the stored one (its cluster was restored from a backup). Reports' answers name the operator's
    revision; when that stays different from the poll's cursor, the poll begins again from where the operator is.
    """

    def __init__(
        self,
        api: OperatorApi,
        run_dir: Path,
        clock: Clock,
        uniform: Callable[[float, float], float],
        *,
        abort: Callable[[], None] = lambda: None,
        on_stored: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._api = api
        self._path = run_dir / c.MEMBERSHIP_FILE
        self._clock = clock
        self._uniform = uniform
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
        """One long poll; returns the seconds to wait before the next."""
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
        """What a report's answer says the operator's revision is; ends a long poll that waits in the wrong place.
        False while the two differ."""
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
        self._contact(logging.WARNING, _kind(error), f"no membership from the operator: {error}")
        pause = backoff(
            self._failures, first=c.BACKOFF_FIRST_SECONDS, longest=c.BACKOFF_MAX_SECONDS, uniform=self._uniform
        )
        return _at_least(error, pause)

    def _found(self) -> int:
        """The revision that an earlier sidecar of this pod has stored, 0 when there is none that can be used."""
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


def connect(
    url: str, token_file: Path, ca_file: Path, monotonic: Callable[[], float]
) -> tuple[OperatorApi, Connection]:
    """A connection to the operator and the API over it."""
    connection = Connection(url, monotonic, context=ReloadingTlsContext(ca_file))
    return OperatorApi(connection, token_file, connection.turn), connection


def _kind(error: Exception) -> str:
    """What makes two failures the same one in the log: their text without numbers that change."""
    kind = "".join(letter for letter in str(error) if not letter.isdigit())
    return f"{type(error).__name__}: {kind}" if not isinstance(error, MalformedError) else "malformed"
