"""The tiers that this launcher owns on its node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.launcher.config import LauncherConfig
from holdfast.launcher.drain.last_checkpoint_plan import Speed, TierEstimate
from holdfast.launcher.membership.document import Member

if TYPE_CHECKING:
    from holdfast.launcher.tiers.tier_host import TierHost


class NodeTiers:
    """The hosts of all tiers. Most launchers have none, and import no module of a tier."""

    def __init__(self, config: LauncherConfig) -> None:
        self._hosts: list[TierHost] = []
        if config.memory is not None:
            from holdfast.launcher.tiers.memory_tier import MemoryHost

            self._hosts.append(MemoryHost(config.memory, identity=config.identity, host=config.host))
        if config.local is not None:
            from holdfast.launcher.tiers.local_disk_tier import LocalHost

            self._hosts.append(LocalHost(config.local, identity=config.identity, host=config.host))

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return what a rank needs to use each tier, by name."""
        return {host.name: description for host in self._hosts if (description := host.describe()) is not None}

    def estimates(self, speeds: Mapping[str, Speed], members: Iterable[Member]) -> list[TierEstimate]:
        """Return where a last checkpoint of this world could lie, in the order in which tiers are filled."""
        members = list(members)
        return [one for host in self._hosts for one in host.estimates(speeds, members)]

    def start(self) -> None:
        """Acquire the folders and serve them."""
        for host in self._hosts:
            host.start()

    def admit(self, job_key: bytes) -> None:
        """Serve launchers that have this key."""
        for host in self._hosts:
            host.admit(job_key)

    def close(self, *, complete: bool) -> None:
        """Release the folders, and delete the files of a complete job."""
        for host in self._hosts:
            host.close(complete=complete)

    @property
    def rejected(self) -> int:
        """The number of connections that were refused because they did not have the key."""
        return sum(host.rejected for host in self._hosts)
