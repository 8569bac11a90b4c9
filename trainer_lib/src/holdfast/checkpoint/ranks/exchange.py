"""Exchange of small JSON values between the ranks of one checkpoint, never over the training group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

from holdfast.core import errors
from holdfast.core.errors import CheckpointError, HoldfastError, PeerLostError, UnavailableError


class JsonMessage(Protocol):
    """A type with a JSON form."""

    def to_json(self) -> dict[str, Any]:
        """Return the form to send."""

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse a received form."""


T = TypeVar("T", bound=JsonMessage)


class Exchange(Protocol):
    """Collectives on JSON values. Every rank calls each of them, in the same order."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of ranks, on every rank."""

    def share(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""


class SingleRank:
    """The exchange of a single rank."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def share(self, value: Any) -> Any:
        return value


def gather(exchange: Exchange, own: T) -> list[T]:
    """Return every rank's value of one type, in order of ranks, on every rank."""
    return [type(own).from_json(value) for value in exchange.gather(own.to_json())]


def share(exchange: Exchange, kind: type[T], own: T | None) -> T:
    """Return rank 0's value of this type on every rank. The other ranks pass None."""
    return kind.from_json(exchange.share(None if own is None else own.to_json()))


def lead(exchange: Exchange, action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0. Every rank returns its result, or raises its error."""
    outcome: dict[str, Any] = {}
    if exchange.rank == 0:
        outcome = _attempt(action)
    outcome = exchange.share(outcome)
    if "error" in outcome:
        raise _error(outcome)
    return outcome["answer"]


def each(exchange: Exchange, action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank. Every rank returns all results, or raises the first error."""
    outcomes = exchange.gather(_attempt(action))
    for outcome in outcomes:
        if "error" in outcome:
            raise _error(outcome)
    return [outcome["answer"] for outcome in outcomes]


def _attempt(action: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"answer": action()}
    except PeerLostError:
        raise
    except HoldfastError as error:
        cause = {"cause": error.cause} if isinstance(error, UnavailableError) else {}
        return {"error": type(error).__name__, "message": str(error), **cause}
    except OSError as error:
        return {"error": "CheckpointError", "message": f"{error}: correct the checkpoint folder and start again"}


def _error(outcome: dict[str, Any]) -> HoldfastError:
    kind = getattr(errors, str(outcome["error"]), CheckpointError)
    if "cause" in outcome:
        return UnavailableError(outcome["message"], cause=outcome["cause"])
    error: HoldfastError = kind(outcome["message"])
    return error
