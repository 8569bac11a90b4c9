"""The wait before the next try: exponential, with deterministic jitter.

The jitter prevents jobs that one fault affected from restarting at the same time. It is derived from the job and the
incident, so that a repeated pass plans the same wait.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.spec.recovery import Backoff
from holdfast_operator.decision.draft import PlanDraft


def pause(backoff: Backoff, count: int, key: str) -> timedelta:
    """Return the wait before try number ``count`` (from 1): the exponential backoff, less up to ``jitterPercent``."""
    whole = backoff.seconds(count)
    return timedelta(seconds=whole * (1.0 - backoff.jitter_percent / 100.0 * share(key)))


def start_retry(draft: PlanDraft) -> timedelta:
    """Return the wait after a failed start: the time that the problem has lasted, so the wait doubles."""
    trouble = draft.status.trouble
    lasted = draft.now - trouble.since if trouble is not None else timedelta(0)
    return min(max(lasted, draft.timings.template_retry), c.TEMPLATE_RETRY_MAX)


def share(key: str) -> float:
    """Return a pseudorandom number in [0, 1) that depends only on ``key``."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**32
