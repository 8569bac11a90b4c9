"""The operator's API for agents over TLS, with the pod's token."""

import http
import ipaddress
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import BusyError, ContractError, MalformedError, TransportError
from holdfast_sidecar.protocol.document import parse_document
from holdfast_sidecar.run_dir.files import Stamp, stamp
from holdfast_sidecar.runtime.http import Connection, Response, Transport

REFUSALS = {
    401: "the operator does not accept this pod's token (401)",
    403: "the operator rejects the token: it belongs to another pod (403)",
    404: "the operator knows no job that this pod belongs to (404)",
    413: "the report is too large for the operator (413)",
    429: "the operator rejects requests: this pod sends too many (429)",
}


class ReloadingTlsContext:
    """The CA bundle as a TLS context, loaded again when the file changes. Verification cannot be disabled."""

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
    """One connection to the operator, with the pod's token on each request.

    The token rotates, so it is read for each request. It is never logged. A standby names the leader, and `switch_to`
    connects to it. After a failure there, the connection returns to the operator's own name.
    """

    def __init__(
        self,
        transport: Transport,
        token_file: Path,
        switch_to: Callable[[tuple[str, int] | None], bool] = lambda _: False,
    ) -> None:
        self._transport = transport
        self._token_file = token_file
        self._switch_to = switch_to

    def send(self, method: str, path: str, *, body: bytes | None, timeout: float) -> Response:
        """Return the answer if it is 200 or 204, else raise `TransportError` with a message of one line."""
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            response = self._transport.request(method, path, headers=headers, body=body, timeout=timeout)
        except TransportError:
            if not self._switch_to(None):
                raise
            response = self._transport.request(method, path, headers=headers, body=body, timeout=timeout)
        if response.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            self._switch_to(_address(_leader(response)))
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
            raise TransportError(f"the token {self._token_file} is empty or corrupt")
        return token


def _leader(response: Response) -> str:
    """Return the URL that a standby names, or an empty string."""
    try:
        leader = parse_document(response.body, "the answer").get("leader")
    except ContractError:
        return ""
    return str(leader or "")


def _address(url: str) -> tuple[str, int] | None:
    """Return host and port. Only IP addresses are valid, because a DNS lookup has no time limit."""
    try:
        parts = urlsplit(url)
        host = str(ipaddress.ip_address(parts.hostname or ""))
        return (host, parts.port or 443) if parts.scheme == "https" else None
    except ValueError:
        return None


def _retry_after(response: Response) -> float:
    """Return the seconds that it names, or 0."""
    text = response.headers.get("retry-after", "")
    named = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return float(min(named, c.RETRY_AFTER_MAX_SECONDS))


def at_least(error: Exception, pause: float) -> float:
    """Use the pause that the operator requests."""
    return max(pause, error.seconds) if isinstance(error, BusyError) else pause


def _refusal(response: Response) -> str:
    if response.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        return f"the operator is not serving now (503), its leader is {(_leader(response) or 'not known')[:200]}"
    return REFUSALS.get(response.status) or f"the operator answered {response.status}{_complaint(response)}"


def _complaint(response: Response) -> str:
    """Return the operator's message, if any."""
    try:
        error = parse_document(response.body, "the answer").get("error")
    except ContractError:
        return ""
    return f": {error[:200]}" if isinstance(error, str) else ""


def connect(
    url: str, token_file: Path, ca_file: Path, monotonic: Callable[[], float]
) -> tuple[OperatorApi, Connection]:
    """A connection to the operator and the API over it."""
    connection = Connection(url, monotonic, context=ReloadingTlsContext(ca_file))
    return OperatorApi(connection, token_file, connection.switch_to), connection


def error_kind(error: Exception) -> str:
    """Return the text of a failure without numbers. Failures with equal texts are logged once."""
    kind = "".join(letter for letter in str(error) if not letter.isdigit())
    return f"{type(error).__name__}: {kind}" if not isinstance(error, MalformedError) else "malformed"
