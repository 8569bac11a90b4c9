"""How long to wait before the next try: exponential, with a jitter that is the same whenever it is asked for.

The jitter keeps jobs that one fault hit from coming back in step. It comes from the job and the incident, not from
chance, so that a pass that is made again plans the same.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.spec.recovery import Backoff
from holdfast_operator.decision.draft import PlanDraft


def pause(backoff: Backoff, count: int, key: str) -> timedelta:
    """The wait before try number ``count`` (from 1): never longer than the doubled one, shorter by the jitter."""
    whole = backoff.seconds(count)
    return timedelta(seconds=whole * (1.0 - backoff.jitter_percent / 100.0 * share(key)))


def start_retry(draft: PlanDraft) -> timedelta:
    """The wait before the next try of what cannot start: as long as that has lasted, so each wait is doubled."""
    trouble = draft.status.trouble
    lasted = draft.now - trouble.since if trouble is not None else timedelta(0)
    return min(max(lasted, c.TEMPLATE_RETRY), c.TEMPLATE_RETRY_MAX)


def share(key: str) -> float:
    """A number from 0 to below 1 that looks like chance and is not."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**32
