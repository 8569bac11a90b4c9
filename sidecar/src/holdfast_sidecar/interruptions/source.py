"""The interface of a source of notices."""

from datetime import datetime
from typing import Protocol

from holdfast_sidecar.protocol.notice import Notice


class Source(Protocol):
    """A source of notices, which is polled. Its state only makes polls cheaper."""

    @property
    def name(self) -> str:
        """The name in the settings and in `Notice.source`."""
        ...

    @property
    def longest(self) -> float:
        """The longest duration of one poll in seconds. A longer one is stuck."""
        ...

    @property
    def known(self) -> bool:
        """Whether the service has once answered as only this cloud's does, even if it was too busy.

        Otherwise it is probably absent.
        """
        ...

    def poll(self, now: datetime) -> tuple[Notice, ...]:
        """Return the valid notices, the most urgent first. An interruption is returned alone.

        A poll never sleeps, but may wait for an answer that the service holds until there is news. A notice is
        returned by each poll while it is valid, and the caller distinguishes notices by ID. Raises `SidecarError` if
        the source does not report whether the machine is interrupted. If another request fails, its last answer stays
        valid.
        """
        ...
