"""What a source of notices is."""

from datetime import datetime
from typing import Protocol

from holdfast_sidecar.contract import Notice


class Source(Protocol):
    """Where notices come from. It is asked again and again; what it remembers is only what makes asking cheaper."""

    @property
    def name(self) -> str:
        """As in the settings and in `Notice.source`."""
        ...

    def poll(self, now: datetime) -> Notice | None:
        """The most urgent notice that holds now, or None.

        It never sleeps and returns within seconds. The same notice comes back at each poll while it holds; whoever
        asks keeps count by its id. Raises `SidecarError` when the source gave no usable answer.
        """
        ...
