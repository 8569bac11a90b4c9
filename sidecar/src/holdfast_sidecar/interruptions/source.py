"""What a source of notices is."""

from datetime import datetime
from typing import Protocol

from holdfast_sidecar.protocol.notice import Notice


class Source(Protocol):
    """Where notices come from. It is asked again and again; what it remembers is only what makes asking cheaper."""

    @property
    def name(self) -> str:
        """As in the settings and in `Notice.source`."""
        ...

    @property
    def longest(self) -> float:
        """Seconds that one poll may take at most; a longer one is stuck."""
        ...

    @property
    def known(self) -> bool:
        """Whether the service once answered as only this cloud's does, be it that it is too busy. One that never did
        is probably not here."""
        ...

    def poll(self, now: datetime) -> tuple[Notice, ...]:
        """The notices that hold now, most urgent first; an interruption stands alone, as nothing matters beside it.

        It never sleeps, though it may wait for an answer that the service holds back until there is news. A notice
        comes back at each poll while it holds; whoever asks keeps count by its id. Raises `SidecarError` when the
        source does not say whether the machine is interrupted; where it is silent on anything less, what it said
        before holds.
        """
        ...
