"""The renewals of a node's Lease, as the operator read them.

The clock of another machine proves nothing. The operator uses only two facts about a Lease: that its time changed,
and when the operator read the change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from holdfast_operator.api import names as c


@dataclass(frozen=True, kw_only=True)
class Renewals:
    """A series of renewals without a gap. All times are the operator's, except ``value`` and ``first``."""

    value: datetime  # the Lease's newest time, by the node's clock
    at: datetime  # when this value was first read
    read_at: datetime
    since: datetime | None  # no gap was observed since; None: the next renewal starts a series
    first: datetime | None = None  # the first renewal of the series, by the node's clock
    first_at: datetime | None = None


def read_renewal(known: Renewals | None, value: datetime | None, *, ready: bool, now: datetime) -> Renewals | None:
    """Return the series after one more read of the Lease. A node that is not ready ends the series, as a gap does."""
    if value is None:
        return None
    if known is None or now - known.read_at > c.LEASE_GAP:
        row = Renewals(value=value, at=now, read_at=now, since=now)
    elif value == known.value:
        row = replace(known, read_at=now)
    elif known.since is None or now - known.at > c.LEASE_GAP:
        row = Renewals(value=value, at=now, read_at=now, since=now, first=value, first_at=now)
    else:
        first, first_at = known.first or value, known.first_at or now
        row = replace(known, value=value, at=now, read_at=now, first=first, first_at=first_at)
    return row if ready else replace(row, since=None, first=None, first_at=None)
