"""A thread that does one thing again and again."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_sidecar.runtime.clock import Clock


@dataclass(kw_only=True)
class Loop:
    """A thread that calls `step` and then waits as long as that says, or until it is woken."""

    name: str
    step: Callable[[], float]
    stop: threading.Event
    clock: Clock
    limit: float
    """Seconds after which a loop that has not come round is stuck."""

    def __post_init__(self) -> None:
        self.woken = threading.Event()
        self.rounds = 0
        self._last_round = self.clock.monotonic()
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def wake(self) -> None:
        self.woken.set()

    def problem(self) -> str | None:
        """What is wrong with it, for the probe."""
        silent = self.clock.monotonic() - self._last_round
        return f"{self.name} is stuck for {silent:.0f} s" if silent > self.limit else None

    def _run(self) -> None:
        while not self.stop.is_set():
            self.woken.clear()
            wait = self.step()
            self.rounds += 1
            self._last_round = self.clock.monotonic()
            if wait > 0:
                self.woken.wait(wait)
