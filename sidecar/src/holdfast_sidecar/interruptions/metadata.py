"""Common parts of the answers of metadata services: JSON, times, and a clock that may differ from this host's."""

import contextlib
import http
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import SidecarError, SourceError
from holdfast_sidecar.protocol.document import Document
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.runtime.http import Response
from holdfast_sidecar.runtime.logs import Transitions

_log = logging.getLogger(__name__)

OnError = Callable[[str], None]
Read = TypeVar("Read")


def successful(response: Response, path: str) -> Response:
    """The answer, which must be 200."""
    if response.status != http.HTTPStatus.OK:
        raise SourceError(f"{path} answered {response.status}")
    return response


def json_object(body: bytes, path: str) -> Document:
    """A body that must be a JSON object."""
    answer = _json(body, path)
    if not isinstance(answer, dict):
        raise SourceError(f"{path} answered with something that is not an object")
    return answer


def json_list(body: bytes, path: str) -> list[Any]:
    """A body that must be a JSON array."""
    answer = _json(body, path)
    if not isinstance(answer, list):
        raise SourceError(f"{path} answered with something that is not a list")
    return answer


def _json(body: bytes, path: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} answered with something that is not JSON") from error


def http_time(text: object, what: str) -> datetime:
    """A time as in `21 Jan 2019 09:00:43 GMT`, with or without the day of the week."""
    try:
        when = parsedate_to_datetime(str(text))
        return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, IndexError, OverflowError) as error:
        raise SourceError(f"{what} is no time: {str(text)[:40]!r}") from error


def on_this_host(when: datetime, response: Response, now: datetime) -> datetime:
    """Convert the cloud's time `when` to this host's clock, by the answer's `Date`.

    Deadlines use this host's clock. A clock that is wrong by minutes must neither end a drain before its checkpoint
    nor let it wait until the machine is gone.
    """
    try:
        skew = now - http_time(response.headers.get("date"), "Date")
        return when if abs(skew) < timedelta(seconds=c.CLOCK_TOLERANCE_SECONDS) else when + skew
    except (SourceError, OverflowError):
        return when


def readable(entries: Iterable[Any], read: Callable[[Any], Read | None]) -> list[Read]:
    """Parse the entries of a list. A malformed entry hides no other. If there is no other, it is an error."""
    found: list[Read] = []
    problem: SourceError | None = None
    for entry in entries:
        try:
            said = read(entry)
        except SourceError as error:
            problem = problem or error
        else:
            found += [] if said is None else [said]
    if problem is not None and not found:
        raise problem
    return found


class OptionalEndpoint:
    """A request after the one for the interruption. Its errors are counted and logged once, and hide no notice."""

    def __init__(self, source: str, path: str, on_error: OnError) -> None:
        self._source = source
        self._path = path
        self._on_error = on_error
        self._state = Transitions(_log, "answers")

    @contextlib.contextmanager
    def question(self) -> Iterator[None]:
        """Around the question."""
        try:
            yield
        except SidecarError as error:
            self._on_error(self._source)
            self._state(logging.WARNING, "fails", f"{self._source}: nothing new of {self._path} for now ({error})")
        else:
            self._state(logging.INFO, "answers", f"{self._source}: {self._path} answers again")


def actionable(notices: Iterable[Notice], now: datetime, checkpoint_deadline: timedelta) -> tuple[Notice, ...]:
    """Return the notices that are near, the most urgent first.

    An interruption is returned alone. Maintenance is announced up to weeks ahead and is often postponed. Until it is
    near, training continues.
    """
    near = [notice for notice in notices if notice.deadline - now <= _lead_time(notice, checkpoint_deadline)]
    near.sort(key=lambda notice: (not notice.drain, notice.deadline))
    return tuple(near[:1] if near and near[0].drain else near)


def _lead_time(notice: Notice, checkpoint_deadline: timedelta) -> timedelta:
    if notice.drain:
        return timedelta(seconds=c.INTERRUPTION_LEAD_SECONDS)
    return checkpoint_deadline + timedelta(seconds=2 * c.SOURCE_POLL_SECONDS)
