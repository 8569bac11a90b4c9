"""The only module that uses kopf: it turns watches into keys.

kopf never retries ``on.event`` handlers. They therefore only update the cache and add to the queue; they write no
annotations and no finalizers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, repeat
from typing import Any

import kopf

from holdfast_operator.api import names as c
from holdfast_operator.cluster.client import JOBS_PAGE, PAGE
from holdfast_operator.cluster.informer import Feed
from holdfast_operator.errors import WatchEndedError

_IDLE_SECONDS = 0.1
_WATCH_CHECK_SECONDS = 10.0
# Names of kopf's own tasks.
_WATCHER = "watcher for "
_RUNS = "stop-flag checker"


def registry(feed: Feed) -> kopf.OperatorRegistry:
    """Return kopf's handlers for one process."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.startup(registry=handlers)
    async def begin(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> Any:
        return kopf.login_via_client(**kwargs)

    @kopf.on.event(c.GROUP, c.API_VERSION, c.PLURAL, registry=handlers)
    async def job(event: Any, **_: Any) -> None:
        feed.job(event["type"], dict(event["object"]))

    @kopf.on.event("", "v1", "pods", labels={c.LABEL_APP_MANAGED_BY: c.MANAGED_BY}, registry=handlers)
    async def pod(event: Any, **_: Any) -> None:
        feed.pod(event["type"], dict(event["object"]))

    @kopf.on.event("", "v1", "nodes", registry=handlers)
    async def node(event: Any, **_: Any) -> None:
        feed.node(event["type"], dict(event["object"]))

    return handlers


def configure(settings: kopf.OperatorSettings) -> None:
    """Set how kopf watches."""
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = _Patience()
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 5
    # Otherwise the first list arrives in one page: for ten thousand pods 100 MB, and ten times as much when parsed.
    settings.watching.chunk_size = _Page(PAGE)
    # An object's worker keeps the unmodified object in memory until it ends.
    settings.queueing.idle_timeout = _IDLE_SECONDS
    settings.watching.label_selectors["", "v1", "pods"] = c.POD_SELECTOR
    settings.persistence.diffbase_storage = _NoMemory()
    settings.persistence.finalizer = f"{c.GROUP}/operator"


class _NoMemory(kopf.DiffBaseStorage):
    """Disable kopf's copies.

    kopf copies the object several times per event, for handlers of changes, which the operator does not have. With
    ten thousand pods, these copies would delay all passes after a start.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class _Page(int):
    """Set the number of objects per page. kopf has one setting for all kinds, and a job may be large."""

    def __str__(self) -> str:
        task = asyncio.current_task()
        jobs = task is not None and task.get_name().startswith(f"{_WATCHER}{c.PLURAL}.")
        return str(JOBS_PAGE if jobs else int(self))


class _Patience:
    """Endless pauses, so that a watch survives an unreachable API server. Each request iterates from the start."""

    def __iter__(self) -> Iterator[float]:
        return chain((0.5, 1.0, 2.0), repeat(3.0))


def serve(feed: Feed, namespaces: tuple[str, ...], ended: threading.Event) -> None:
    """Watch until a signal, also one from before the start.

    Returns or raises if watching is impossible. kopf handles signals while it starts; an earlier one is reported only
    by ``ended``.
    """
    with suppress(asyncio.CancelledError):
        asyncio.run(_watch(feed, namespaces, ended))


async def _watch(feed: Feed, namespaces: tuple[str, ...], ended: threading.Event) -> None:
    stop, ready, handlers = asyncio.Event(), asyncio.Event(), registry(feed)

    @kopf.on.cleanup(registry=handlers)
    async def end(**_: Any) -> None:
        stop.set()  # after a signal, kopf would wait 5 s for the task that waits for this

    early = asyncio.create_task(_hear_early(ended, ready, stop))
    watches = asyncio.create_task(_end_with_a_watch(ready, stop))
    try:
        await kopf.operator(
            registry=handlers,
            standalone=True,
            clusterwide=not namespaces,
            namespaces=list(namespaces),
            stop_flag=stop,
            ready_flag=ready,
        )
    finally:
        early.cancel()
        watches.cancel()
    if watches.done() and not watches.cancelled():
        watches.result()


async def _end_with_a_watch(ready: asyncio.Event, stop: asyncio.Event) -> None:
    """Stop everything when a watch has ended, because kopf continues without a watch that was cancelled or returned.

    Without the watch, changes would reach the operator only with the next full list, minutes later.
    """
    await ready.wait()
    before: set[str] = set()
    while True:
        tasks = {task.get_name() for task in asyncio.all_tasks() if not task.done()}
        if _RUNS not in tasks:  # it was stopped regularly
            return
        there = {name for name in tasks if name.startswith(_WATCHER)}
        if before - there:
            stop.set()
            raise WatchEndedError(f"the {', '.join(sorted(before - there))} ended")
        before = there
        await asyncio.sleep(_WATCH_CHECK_SECONDS)


async def _hear_early(ended: threading.Event, ready: asyncio.Event, stop: asyncio.Event) -> None:
    """Wait until kopf handles signals itself, one turn of the loop after its tasks have started."""
    await ready.wait()
    await asyncio.sleep(0)
    if ended.is_set():
        stop.set()
