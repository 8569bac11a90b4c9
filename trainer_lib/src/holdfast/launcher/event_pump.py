"""The event pump: passes events one by one to the state machine and has its actions carried out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.launcher.membership import state_machine
from holdfast.launcher.membership.events import Action, Event
from holdfast.launcher.membership.state import State

Observer = Callable[[State, State], None]
"""Receives the state before an event and after it."""


class EventPump:
    """Holds state and clock. For each event, the observers run in order, then the actions, then the status."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._origin = time.time() - time.monotonic()
        self._queue: deque[Event] = deque()
        self._feeding = False

    def connect(self, observers: Sequence[Observer], *, execute: Callable[[Action], None], show: Observer) -> None:
        """Set the parts that take part in each event, before the first event."""
        self._observers = observers
        self._execute = execute
        self._show = show

    def now(self) -> float:
        """The clock of the state machine: Unix time that never jumps."""
        return self._origin + time.monotonic()

    def feed(self, event: Event) -> None:
        """Process an event. An event that another event causes is processed after that one."""
        self._queue.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._queue:
                self._step(self._queue.popleft())
        finally:
            self._feeding = False

    def _step(self, event: Event) -> None:
        before = self.state
        decision = state_machine.step(before, event, self.now())
        self.state = decision.state
        for observe in self._observers:
            observe(before, self.state)
        for action in decision.actions:
            self._execute(action)
        self._show(before, self.state)
