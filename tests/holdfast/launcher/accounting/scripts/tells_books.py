"""A rank without torch that uses the agent socket and keeps a ledger. The first process dies in its fifth step."""

import json
import os
import pathlib
import signal
import socket
import time

from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.rank_time import Ledger

folder = pathlib.Path(os.environ["HOLDFAST_RUN_DIR"])
saved = folder / "saved"
wall = socket.socket(socket.AF_UNIX)
wall.connect(os.environ["HOLDFAST_AGENT_SOCKET"])


def say(kind, **body):
    wall.sendall(json.dumps({"type": kind, **body}).encode() + b"\n")


attempt_id = {"generation": int(os.environ["HOLDFAST_GENERATION"]), "attempt": int(os.environ["HOLDFAST_ATTEMPT"])}
say("hello", rank=0, localRank=0, pid=os.getpid(), **attempt_id)
wall.makefile("r").readline()
meter = Meter(Ledger(time.monotonic, lambda report: say("account", **report)))
step = int(saved.read_text()) if saved.exists() else 0
again = step > 0
meter.enter(Activity.SYNC, step)
say("restored", step=step, fromPair=None, quarantined=[])
while step < 8:
    meter.enter(Activity.DATA, step)
    meter.enter(Activity.COMPUTE)
    begun = time.monotonic()  # from here on it counts for this step: the last report took time too
    time.sleep(0.5)  # 1 % of such a run is more than the host may pause between two clocks
    if step == 4 and not again:
        (folder / "wasted").write_text(str(time.monotonic() - begun))
        os.kill(os.getpid(), signal.SIGKILL)
    step += 1
    saved.write_text(str(step))
    say("step", at=time.monotonic(), step=step, loss=2.0 / step, samples=8, seconds=0.5, lr=0.1, worldSize=1)
meter.enter(Activity.DONE, step)
say("done", step=step)
