"""A rank without torch that completes steps and writes its board, until its fault happens.

steps.py FOLDER SLOT SECONDS FAULT: after thirty steps of this many seconds, `FAULT` happens. The steps begin when
there is a file `begin` next to the folder.
"""

import ctypes
import signal
import sys
import time
from pathlib import Path

from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.activity_page import Board

STEPS = 30


def hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(3600)


def spin() -> None:
    while True:
        pass


def asleep_in_the_loss() -> None:
    time.sleep(3600)


def straggle(meter: Meter, step: int, seconds: float) -> None:
    """Sometimes take three times as long."""
    while True:
        meter.enter(Activity.COMPUTE, step)
        time.sleep(3 * seconds if step % 4 == 0 else seconds)
        step += 1


def main(folder: str, slot: str, seconds: str, fault: str) -> None:
    meter = Meter(Board(Path(folder), int(slot)))
    signal.signal(signal.SIGUSR1, lambda *_: meter.enter(Activity.PARKED))
    while not Path(folder).with_name("begin").exists():
        time.sleep(0.01)
    if fault == "straggle":
        straggle(meter, 0, float(seconds))
    for step in range(STEPS):
        meter.enter(Activity.COMPUTE, step)
        time.sleep(float(seconds))
        meter.enter(Activity.AVERAGE)
        meter.enter(Activity.VOTE)
        meter.enter(Activity.APPLY)
    meter.enter(Activity.COMPUTE, STEPS)
    match fault:
        case "wait":
            meter.enter(Activity.AVERAGE)
            time.sleep(3600)
        case "vote":
            meter.enter(Activity.VOTE)
            time.sleep(3600)
        case "lock":
            hold_the_lock()
        case "spin":
            spin()
        case "sleep":
            asleep_in_the_loss()


main(*sys.argv[1:])
