"""A rank without torch that outlives attempts: a step every 10 ms, and the step count in memory.

The rank writes its events to `TEST_DIR/said-<slot>` as JSON lines. `STUBBORN` slots never send `left`. `TORN` slots
report that they cannot continue. `ASLEEP` slots fall asleep at their hundredth step. `ENDS` slots close their
connection at that step, and exit with 2 some seconds later. `DIES` slots are killed as soon as they left. A process
that is started on standby waits for its world. The loop never calls holdfast.init().
"""

import json
import os
import pathlib
import signal
import socket
import sys
import time
import types

from holdfast.core.environment import read_environment
from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.activity_page import open_board

slot = int(os.environ["HOLDFAST_SLOT"])
story = (pathlib.Path(os.environ["TEST_DIR"]) / f"said-{slot}").open("a")
wall = socket.socket(socket.AF_UNIX)
wall.connect(os.environ["HOLDFAST_AGENT_SOCKET"])
wall.settimeout(0.01)
stubborn, torn, asleep, ends, dies = (
    os.environ.get(name, "").split(",") for name in ("STUBBORN", "TORN", "ASLEEP", "ENDS", "DIES")
)
board = open_board(read_environment()) if any(asleep) or any(ends) else None
meter = Meter(*([board] if board else []))
last_step = int(os.environ.get("STEPS", "1000000"))
me = types.SimpleNamespace(attempt_id=None, left=(0, 0), step=0, quiesced=False)


def say(kind, **body):
    wall.sendall(json.dumps({"type": kind, **body}).encode() + b"\n")
    note(kind, **body)


def note(kind, **body):
    story.write(json.dumps({"type": kind, "at": time.time(), "pid": os.getpid(), **body}) + "\n")
    story.flush()


def attempt_id_of(body):
    return {"generation": int(body["generation"]), "attempt": int(body["attempt"])}


def number(named):
    return (named["generation"], named["attempt"])


def enter(named, rank, local_rank):
    me.attempt_id, me.quiesced = named, False
    say("hello", slot=slot, rank=rank, localRank=local_rank, pid=os.getpid(), **me.attempt_id)


def leave(named):
    meter.enter(Activity.PARKED)
    me.left = max(me.left, number(named))
    if str(slot) not in stubborn:
        say("left", **named, step=me.step, inDoubt=False, keep=str(slot) not in torn)
        if str(slot) in dies:
            os.kill(os.getpid(), signal.SIGKILL)


def handle(order):
    if order["type"] not in ("step", "phase"):
        note("heard", what=order)
    if order["type"] == "leave":
        leave(attempt_id_of(order))
    elif order["type"] == "world":
        enter(attempt_id_of(order), order["rank"], order["localRank"])
    elif order["type"] == "welcome" and "generation" in order and attempt_id_of(order) == me.attempt_id:
        say("restored", step=me.step, fromPair=None, quarantined=[], source="memory" if me.step else "none")
    elif order["type"] == "quiesce":
        me.quiesced = True
        meter.enter(Activity.PARKED)
        say("quiesced", step=me.step)


if os.environ.get("HOLDFAST_STANDBY"):
    say("standby", slot=slot, pid=os.getpid())
    say("ready")
else:
    named = {"generation": int(os.environ["HOLDFAST_GENERATION"]), "attempt": int(os.environ["HOLDFAST_ATTEMPT"])}
    enter(named, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
rest = b""
while me.step < last_step:
    try:
        data = wall.recv(65536)
        if not data:
            sys.exit(76)
        rest += data
    except TimeoutError:
        if me.attempt_id is not None and number(me.attempt_id) > me.left and not me.quiesced:
            if str(slot) in asleep and me.step == 100:
                time.sleep(3600)
            if str(slot) in ends and me.step == 100:
                wall.shutdown(socket.SHUT_RDWR)
                time.sleep(2)  # a process that ends after its socket
                os._exit(2)
            me.step += 1
            meter.enter(Activity.COMPUTE, me.step)
            say("step", step=me.step, loss=2.0, samples=8, seconds=0.01)
    *whole, rest = rest.split(b"\n")
    for line in whole:
        handle(json.loads(line))
say("done", step=me.step)
