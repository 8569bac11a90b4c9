"""Turns at one worker, fair over namespaces and over the jobs of each.

Each job has one waiting request within its namespace, and each namespace has one at the worker. So all namespaces
with requests get equal turns, however many requests one of them has.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager


class Turns:
    """Runs in one event loop only. The memory is bounded by the waiting requests."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, ...], asyncio.Lock] = {}
        self._users: Counter[tuple[str, ...]] = Counter()

    @asynccontextmanager
    async def of(self, namespace: str, job: str) -> AsyncIterator[None]:
        """Wait for the turn of this job, and hold it within the context."""
        async with AsyncExitStack() as held:
            for key in ((namespace, job), (namespace,), ()):
                await held.enter_async_context(self._lock(key))
            yield

    @asynccontextmanager
    async def _lock(self, key: tuple[str, ...]) -> AsyncIterator[None]:
        self._users[key] += 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]
