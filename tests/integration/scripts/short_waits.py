"""The operator with short waits: no kubelet, network or cloud is slow here. ``python short_waits.py [SHIFT]``.

With the file SHIFT, its time of day is that of the machine plus the seconds in the file.
"""

from __future__ import annotations

import functools
import sys
from datetime import datetime, timedelta
from pathlib import Path

from holdfast_operator import main as process
from holdfast_operator.api.timings import Timings
from holdfast_operator.runtime import clock

TIMINGS = Timings(
    look_every=timedelta(seconds=0.5),
    growth_poll=timedelta(seconds=1),
    template_retry=timedelta(seconds=1),
    incident_grace=timedelta(seconds=2),
    exits_gather=timedelta(seconds=2),
    drain_poll=timedelta(seconds=0.5),
    marked_poll=timedelta(seconds=2),
)


def shifted() -> datetime:
    """Return the time of day of this process."""
    return clock.wall() + timedelta(seconds=float(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        process.SteadyClock = functools.partial(clock.SteadyClock, wall=shifted)
    sys.exit(process.main(TIMINGS))
