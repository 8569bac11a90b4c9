"""How the ranks talk of a save that goes on beside their training: through the attempt's store, never its groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, Protocol

from holdfast.training.distributed.process_group import CancelToken, unless_over

# Of one save.
_MOST_CALLS: Final = 6


class Store(Protocol):
    """What is needed of the attempt's store."""

    def set(self, key: str, value: str, /) -> None:
        """Write a key."""

    def get(self, key: str, /) -> bytes:
        """Its value, once somebody wrote it."""

    def delete_key(self, key: str, /) -> bool:
        """Forget a key."""


class StoreClient:
    """A rank's own connection of an attempt, made when the first save needs it."""

    def __init__(self, connect: Callable[[], Store], over: CancelToken) -> None:
        self._connect = connect
        self._over = over
        self._store: Store | None = None

    def call(self, action: Callable[[Store], Any]) -> Any:
        """On a thread that is left behind if the attempt ends: a host that lost its power answers never."""
        return unless_over(lambda: action(self._connected()), self._over)

    def _connected(self) -> Store:
        self._store = self._store or self._connect()
        return self._store


class StoreExchange:
    """The exchange of one save, the `number`th of its attempt; `gather` has the others' values on rank 0 only."""

    def __init__(self, client: StoreClient, *, rank: int, size: int, number: int) -> None:
        self.rank = rank
        self.size = size
        self._client = client
        self._number = number
        self._calls = 0
        self._forgot = False

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks, on rank 0; elsewhere only the own one."""
        call = self._next()
        own = json.dumps(value)
        self._client.call(lambda store: store.set(_key(self._number, call, self.rank), own))
        if self.rank:
            return [value]
        keys = [_key(self._number, call, rank) for rank in range(self.size)]
        told = self._client.call(lambda store: [store.get(key) for key in keys])
        if not self._forgot:
            self._forgot = True
            self._client.call(self._forget_the_last)  # all are in this one, so all have read what was said in it
        return [json.loads(text) for text in told]

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        key = _key(self._number, self._next(), 0)
        if self.rank:
            return json.loads(self._client.call(lambda store: store.get(key)))
        self._client.call(lambda store: store.set(key, json.dumps(value)))
        return value

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def _forget_the_last(self, store: Store) -> None:
        for call in range(1, _MOST_CALLS + 1):
            for rank in range(self.size):
                store.delete_key(_key(self._number - 1, call, rank))


def _key(number: int, call: int, rank: int) -> str:
    return f"{number}/{call}/{rank}"
