"""Sets the clock of every Python process with this folder on its path `DRILL_SKEW_SECONDS` ahead."""

import datetime
import os
import time

_AHEAD = float(os.environ.get("DRILL_SKEW_SECONDS", "0"))
_seconds, _nanoseconds, _moment = time.time, time.time_ns, datetime.datetime


class _Skewed(_moment):
    @classmethod
    def now(cls, tz=None):
        moment = _moment.now(tz) + datetime.timedelta(seconds=_AHEAD)
        return cls.combine(moment.date(), moment.timetz())


if _AHEAD:
    time.time = lambda: _seconds() + _AHEAD
    time.time_ns = lambda: _nanoseconds() + int(_AHEAD * 1e9)
    datetime.datetime = _Skewed
