"""The exchange between ranks for an asynchronous save. It uses the attempt's store, and never its process groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from holdfast.training.distributed.blocking_call import unless_cancelled
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.key_value_store import KeyValueStore

# The limit of calls per save.
_MOST_CALLS: Final = 6


class StoreClient:
    """A rank's own store connection for an attempt, created for the first save."""

    def __init__(self, connect: Callable[[], KeyValueStore], cancel: CancelToken) -> None:
        self._connect = connect
        self._cancel = cancel
        self._store: KeyValueStore | None = None

    def call(self, action: Callable[[KeyValueStore], Any]) -> Any:
        """Run a call on a thread that is abandoned if the attempt ends: a host without power never answers."""
        return unless_cancelled(lambda: action(self._connected()), self._cancel)

    def _connected(self) -> KeyValueStore:
        self._store = self._store or self._connect()
        return self._store


class StoreExchange:
    """The exchange of one save, with its `number` within the attempt.

    `gather` returns the others' values only on rank 0.
    """

    def __init__(self, client: StoreClient, *, rank: int, size: int, number: int) -> None:
        self.rank = rank
        self.size = size
        self._client = client
        self._number = number
        self._calls = 0
        self._forgot = False

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of ranks, on rank 0. Other ranks get only their own."""
        call = self._next()
        own = json.dumps(value)
        self._client.call(lambda store: store.set(_key(self._number, call, self.rank), own))
        if self.rank:
            return [value]
        keys = [_key(self._number, call, rank) for rank in range(self.size)]
        answers = self._client.call(lambda store: [store.get(key) for key in keys])
        if not self._forgot:
            self._forgot = True
            # all ranks are in this save, so all have read the values of the previous one
            self._client.call(self._forget_the_last)
        return [json.loads(text) for text in answers]

    def share(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        key = _key(self._number, self._next(), 0)
        if self.rank:
            return json.loads(self._client.call(lambda store: store.get(key)))
        self._client.call(lambda store: store.set(key, json.dumps(value)))
        return value

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def _forget_the_last(self, store: KeyValueStore) -> None:
        for call in range(1, _MOST_CALLS + 1):
            for rank in range(self.size):
                store.delete_key(_key(self._number - 1, call, rank))


def _key(number: int, call: int, rank: int) -> str:
    return f"{number}/{call}/{rank}"
