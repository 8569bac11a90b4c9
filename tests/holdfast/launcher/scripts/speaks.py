"""A rank without torch that uses the agent socket like the loop: a step every 30 ms until `STEPS`.

The rank keeps its step in a file of its own as a checkpoint. The environment sets the hooks of the tests.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import sys

rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
generation, attempt = int(os.environ["HOLDFAST_GENERATION"]), int(os.environ["HOLDFAST_ATTEMPT"])
saved = pathlib.Path(os.environ["TEST_DIR"]) / "saved"
wall = socket.socket(socket.AF_UNIX)
wall.connect(os.environ["HOLDFAST_AGENT_SOCKET"])
lines = wall.makefile("r")


def say(kind, **body):
    wall.sendall(json.dumps({"type": kind, **body}).encode() + b"\n")


def save(step, ids):
    whole = saved.with_name(f"saved-{os.getpid()}")
    whole.write_text(str(step))
    whole.rename(saved)  # another rank may read it, and this one may be killed
    took = float(os.environ.get("SAVE_SECONDS", "0.01"))
    say("checkpoint", step=step, tier="shared", result="Committed", seconds=took, bytes=1000, ids=ids, message="")


say("hello", rank=rank, localRank=local, pid=os.getpid(), generation=generation, attempt=attempt)
welcome = json.loads(lines.readline())
assert welcome["type"] == "welcome"
step = int(saved.read_text()) if saved.exists() else 0
say("restored", step=step, fromPair=None, quarantined=[])
attempt_id = {"generation": generation, "attempt": attempt}
if rank == 0:
    claim = {
        "version": 1,
        "jobUID": os.environ["HOLDFAST_JOB_UID"],
        "publication": os.environ["HOLDFAST_PUBLICATION"],
    }
    say("claim", claim={**claim, **attempt_id, "fromStep": step, "fromPair": None})
wall.settimeout(0.03)
until = int(os.environ.get("STEPS", "100000"))
every = int(os.environ.get("EVERY", "50"))
raise_at = int(os.environ.get("RAISE_AT", "-1"))
rest = b""
while step < until:
    with contextlib.suppress(TimeoutError):
        rest += wall.recv(65536)
    *whole, rest = rest.split(b"\n")
    for line in whole:
        order = json.loads(line)
        save(step, [order["id"]])
        if order["type"] == "quiesce":
            say("quiesced", step=step)
            signal.pause()
    step += 1
    if step == raise_at:
        frames = ['  File "train.py", line 7, in main', "ValueError: loss is negative"]
        say("exception", name="ValueError", message="loss is negative", traceback=frames, step=step)
        sys.exit(1)
    say("step", step=step, loss=2.0, samples=8, seconds=0.03)
    say("phase", phase="step", step=step)
    if step % every == 0:
        save(step, [])
save(step, [])
say("done", step=step)
