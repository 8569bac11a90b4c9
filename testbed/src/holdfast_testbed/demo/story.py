"""The live view: one line per event, with the seconds since the job was applied."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field

from holdfast_testbed.drill.job_view import Incident, JobView
from holdfast_testbed.drill.watcher import Watcher

NARRATE_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0


class Teller:
    """Prints complete lines in order, from any thread."""

    def __init__(self) -> None:
        self.harmed: float | None = None
        """The time of the last fault, by the wall clock."""
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def fault(self, text: str) -> None:
        self.harmed = time.time()
        self.say("FAULT", text)

    def restart_clock(self) -> None:
        self._start = time.monotonic()

    def say(self, who: str, text: str) -> None:
        with self._lock:
            sys.stdout.write(f"{time.monotonic() - self._start:7.1f} s  {who:<9} {text}\n")
            sys.stdout.flush()


def noticed(incident: Incident, harmed: float | None) -> str:
    """Return which component detected what, and how long after the fault.

    Launchers' incidents are named by the attempt that they ended.
    """
    who = "launchers" if incident.attempt_id.attempt else "operator"
    after = ""
    if harmed is not None and incident.detected is not None:
        after = f" after {max(0.0, incident.detected.timestamp() - harmed):.1f} s"
    what = f"{incident.cause}/{incident.reason}: {incident.message}".splitlines()[0]
    return f"by the {who}{after}: {what}"[:160]


@dataclass
class Narrator:
    """Prints each transition that a watcher detects, once."""

    watcher: Watcher
    teller: Teller
    _told: JobView = field(default_factory=JobView)
    _world: str = ""
    _quiet_until: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Narrator:
        self._thread = threading.Thread(target=self._run, name="narrator", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(NARRATE_SECONDS):
            self._tell_resource(self.watcher.view)
            self._tell_progress()

    def _tell_resource(self, view: JobView) -> None:
        old, self._told = self._told, view
        if view.generation != old.generation and view.generation:
            self.teller.say("operator", f"publishes generation {view.generation}: {', '.join(view.members)}")
        seen = {(i.attempt_id, i.resumed is not None) for i in old.incidents}
        for incident in view.incidents:
            if (incident.attempt_id, False) not in seen and (incident.attempt_id, True) not in seen:
                self.teller.say("noticed", noticed(incident, self.teller.harmed))
            if incident.resumed and (incident.attempt_id, True) not in seen:
                lost = "?" if incident.lost_steps is None else incident.lost_steps
                origin = f", state from: {incident.restored_from}" if incident.restored_from else ""
                self.teller.say("resumed", f"incident {incident.number} is over: {lost} steps lost{origin}")
        for name, (status, reason, message) in view.conditions.items():
            if (status, reason) != old.conditions.get(name, ("", "", ""))[:2] and status == "True":
                self.teller.say("status", f"{name}/{reason}: {message}"[:160])

    def _tell_progress(self) -> None:
        newest = self.watcher.newest()
        if newest is None or time.monotonic() - newest.at > 2:
            return
        world = f"{newest.attempt_id} of {newest.workers}"
        now = time.monotonic()
        if world == self._world and now < self._quiet_until:
            return
        self._world, self._quiet_until = world, now + HEARTBEAT_SECONDS
        text = f"world {newest.attempt_id} with {newest.workers} workers, step {newest.step}"
        loss = f", loss {newest.loss:.3f} bits per byte" if newest.loss is not None else ""
        self.teller.say("training", text + loss)
