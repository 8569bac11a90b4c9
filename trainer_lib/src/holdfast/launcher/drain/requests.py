"""Requests for a checkpoint or a drain, which the sidecar or a script writes to the touch file."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from holdfast.core.log_format import rfc3339
from holdfast.launcher.drain.touch_file import Request, TouchFile
from holdfast.launcher.event_pump import EventPump
from holdfast.launcher.membership.document import Rules
from holdfast.launcher.membership.events import CheckpointRequested, DrainRequested
from holdfast.launcher.ranks.event_adapter import LocalRanks

_log = logging.getLogger("holdfast.launcher")
_POLL_SECONDS = 0.05
# The operator reads this many. Requests may come for weeks, and the sidecar reads no status of more than 1 MiB.
_MOST_NOTICES = 32
# Seconds that remain for a clean exit if the deadline has passed and the launcher still runs.
LEAST_DRAIN_SECONDS = 1.0


class Requests:
    """Turns requests into events, and keeps those that the status shows."""

    def __init__(self, pump: EventPump, touch: TouchFile, local: LocalRanks, node: str) -> None:
        self.notices: deque[dict[str, Any]] = deque(maxlen=_MOST_NOTICES)
        self._touch = touch
        self._local = local
        self._node = node
        self._pump = pump

    async def watch(self) -> None:
        """Process each request as it arrives, until cancelled."""
        while True:
            request = self._touch.take()
            if request is not None:
                self._requested(request)
            await asyncio.sleep(_POLL_SECONDS)

    def _requested(self, request: Request) -> None:
        fields = {"id": request.id, "drain": request.drain, "source": request.source}
        _log.info("checkpoint requested: %s", request.reason, extra={"fields": fields})
        if request.document:
            self.notices.append(_notice(request, self._pump.now()))
        self._local.expect_answer(request.id)
        if request.drain:
            node = self._node if request.node_leaves else ""
            until = self._until(request)
            self._pump.feed(DrainRequested(id=request.id, reason=request.reason, until=until, node=node))
        else:
            self._pump.feed(CheckpointRequested(id=request.id, reason=request.reason))

    def _until(self, request: Request) -> float | None:
        """Return the earlier of the request's and the job's deadline; None if the request has none."""
        ends_at, membership = request.ends_at(), self._pump.state.membership
        if ends_at is None:
            return None
        rules = membership.rules if membership else Rules()
        return min(max(ends_at, self._pump.now() + LEAST_DRAIN_SECONDS), self._pump.now() + rules.checkpoint_deadline)


def _notice(request: Request, moment: float) -> dict[str, Any]:
    return {
        "id": request.id,
        "reason": request.reason,
        "source": request.source,
        "action": "drain" if request.drain else "checkpoint",
        "deadline": request.deadline,
        "observedAt": request.requested_at or rfc3339(moment),
    }
