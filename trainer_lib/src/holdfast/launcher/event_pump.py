"""The event pump: events go one after the other through the state machine, and what it decides is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from holdfast.launcher.membership import state_machine
from holdfast.launcher.membership.events import Action, Event
from holdfast.launcher.membership.state import State

Observer = Callable[[State, State], None]
"""Sees the state before an event and after it."""


class EventPump:
    """Holds the state. For each event: the observers in their order, then the actions, then the status."""

    def __init__(
        self,
        state: State,
        now: Callable[[], float],
        *,
        observers: Sequence[Observer],
        execute: Callable[[Action], None],
        show: Observer,
    ) -> None:
        self.state = state
        self._now = now
        self._observers = observers
        self._execute = execute
        self._show = show
        self._queue: deque[Event] = deque()
        self._feeding = False

    def feed(self, event: Event) -> None:
        """Let the core see an event and do what it decides, in order also when one leads to the next."""
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
        decision = state_machine.step(before, event, self._now())
        self.state = decision.state
        for observe in self._observers:
            observe(before, self.state)
        for action in decision.actions:
            self._execute(action)
        self._show(before, self.state)
