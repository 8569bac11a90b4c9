"""AWS EC2: spot interruptions and rebalance recommendations from the instance metadata service, version 2.

Inside a pod the instance's hop limit must be 2 or more: with 1 the answer never arrives.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta

from holdfast_sidecar import constants as c
from holdfast_sidecar.contract import INTERRUPTIONS, Document, Notice, parse_time
from holdfast_sidecar.errors import MalformedError, SourceError
from holdfast_sidecar.transport import Response, Transport

TOKEN_PATH = "/latest/api/token"  # noqa: S105 - a path
SPOT_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
TTL_HEADER = "x-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "x-aws-ec2-metadata-token"  # noqa: S105 - a header's name
_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")


class AwsSource:
    """Asks for the interruption first: once it is known, a rebalance recommendation adds nothing."""

    name = c.PROVIDER_AWS

    def __init__(self, transport: Transport, monotonic: Callable[[], float], *, checkpoint_deadline: float) -> None:
        self._transport = transport
        self._monotonic = monotonic
        self._checkpoint_deadline = timedelta(seconds=checkpoint_deadline)
        self._token = ""
        self._renew_at = 0.0

    def poll(self, now: datetime) -> Notice | None:
        """The interruption, else the recommendation, else None."""
        if (answer := self._get(SPOT_PATH)) is not None:
            return self._interruption(_parsed(answer, SPOT_PATH), now)
        if (answer := self._get(REBALANCE_PATH)) is not None:
            return self._rebalance(_parsed(answer, REBALANCE_PATH), now)
        return None

    def _interruption(self, answer: Document, now: datetime) -> Notice:
        action, when = answer.get("action"), _time(answer, "time", SPOT_PATH)
        if not isinstance(action, str) or action not in INTERRUPTIONS:
            raise SourceError(f"{SPOT_PATH} names an action that is not known: {str(action)[:40]!r}")
        return Notice(
            id=f"aws-spot-{when:%Y-%m-%dT%H:%M:%SZ}",
            reason=f"spot/instance-action {action}",
            source=self.name,
            action=action,
            deadline=when,
            observed_at=now,
        )

    def _rebalance(self, answer: Document, now: datetime) -> Notice:
        when = _time(answer, "noticeTime", REBALANCE_PATH)
        return Notice(
            id=f"aws-rebalance-{when:%Y-%m-%dT%H:%M:%SZ}",
            reason="events/recommendations/rebalance",
            source=self.name,
            action="rebalance",
            deadline=now + self._checkpoint_deadline,
            observed_at=now,
        )

    def _get(self, path: str) -> bytes | None:
        """The answer's body, None for 404, which says that there is nothing to tell. A token that the service no
        longer takes is renewed once."""
        response = self._authorised(path)
        if response.status == 401:
            self._renew_at = 0.0
            response = self._authorised(path)
        if response.status == 404:
            return None
        if response.status != 200:
            raise SourceError(f"{path} answered {response.status}")
        return response.body

    def _authorised(self, path: str) -> Response:
        if self._monotonic() >= self._renew_at:
            self._renew_token()
        return self._send("GET", path, {TOKEN_HEADER: self._token})

    def _renew_token(self) -> None:
        response = self._send("PUT", TOKEN_PATH, {TTL_HEADER: str(c.METADATA_TOKEN_TTL_SECONDS)})
        token = response.body.decode("latin-1").strip()
        if response.status != 200 or not _TOKEN.fullmatch(token):
            raise SourceError(f"{TOKEN_PATH} gave no token, status {response.status}")
        try:
            lifetime = float(response.headers.get(TTL_HEADER, c.METADATA_TOKEN_TTL_SECONDS))
        except ValueError as error:
            raise SourceError(f"{TOKEN_PATH} gave no usable lifetime") from error
        self._token = token
        self._renew_at = self._monotonic() + 0.9 * max(lifetime, 0.0)

    def _send(self, method: str, path: str, headers: dict[str, str]) -> Response:
        return self._transport.request(method, path, headers=headers, body=None, timeout=c.METADATA_TIMEOUT_SECONDS)


def _parsed(body: bytes, path: str) -> Document:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} answered with something that is not JSON") from error
    if not isinstance(answer, dict):
        raise SourceError(f"{path} answered with something that is not an object")
    return answer


def _time(answer: Document, field: str, path: str) -> datetime:
    try:
        return parse_time(str(answer.get(field)))
    except MalformedError as error:
        raise SourceError(f"{path} names no usable {field}: {error}") from error
