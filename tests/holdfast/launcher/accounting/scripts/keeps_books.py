"""A rank without torch that sleeps through its activities, and times them itself from inside and from outside."""

import json
import sys
import time

from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.rank_time import Ledger

slow, delay = Activity(sys.argv[1]), float(sys.argv[2])
ledger = Ledger(time.monotonic)
meter = Meter(ledger)
within = dict.fromkeys(Activity, 0.0)
without = dict.fromkeys(Activity, 0.0)
since: dict[str, float] = {}


def does(activity: Activity, step: int | None = None) -> None:
    before = time.perf_counter()
    meter.enter(activity, step)
    entered = time.perf_counter()
    for known, began in since.items():
        without[Activity(known)] += entered - began
    since.clear()
    since[activity] = before
    time.sleep(0.01 + (delay if activity is slow else 0.0))
    within[activity] += time.perf_counter() - entered


born = time.perf_counter()
does(Activity.SYNC, 0)
for made in range(3):
    for doing in (Activity.DATA, Activity.COMPUTE, Activity.AVERAGE, Activity.VOTE, Activity.APPLY):
        does(doing, made if doing is Activity.DATA else None)
    does(Activity.CHECKPOINT, made + 1)
    does(Activity.EVALUATION)
does(Activity.DONE)
wall = time.perf_counter() - born
print(json.dumps({"wall": wall, "within": within, "without": without, "report": ledger.report()}))
