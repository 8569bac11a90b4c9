"""The tiers that this launcher owns on its node: memory, and a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.launcher.config import LauncherConfig

if TYPE_CHECKING:
    from holdfast.launcher.tiers.local_disk_tier import LocalHost
    from holdfast.launcher.tiers.memory_tier import MemoryHost


class NodeTiers:
    """The hosts of both tiers; most launchers have none, and load neither module."""

    def __init__(self, config: LauncherConfig) -> None:
        self.memory: MemoryHost | None = None
        self.disk: LocalHost | None = None
        if config.memory is not None:
            from holdfast.launcher.tiers.memory_tier import MemoryHost

            self.memory = MemoryHost(config.memory, identity=config.identity, host=config.host)
        if config.local is not None:
            from holdfast.launcher.tiers.local_disk_tier import LocalHost

            self.disk = LocalHost(config.local, identity=config.identity, host=config.host)
        self._hosts = [host for host in (self.memory, self.disk) if host is not None]

    def describe_memory(self) -> dict[str, Any] | None:
        """Return what a rank must know of the memory tier, if there is one."""
        return None if self.memory is None else self.memory.describe()

    def describe_disk(self) -> dict[str, Any] | None:
        """Return what a rank must know of the disk, if there is one."""
        return None if self.disk is None else self.disk.describe()

    def start(self) -> None:
        """Take and serve the folders."""
        for host in self._hosts:
            host.start()

    def admit(self, job_key: bytes) -> None:
        """Serve launchers that hold this key."""
        for host in self._hosts:
            host.admit(job_key)

    def close(self, *, complete: bool) -> None:
        """Release the folders; delete what a complete job left in them."""
        for host in self._hosts:
            host.close(complete=complete)

    @property
    def strangers(self) -> int:
        """How many connections were refused because they did not hold the key."""
        return sum(host.strangers for host in self._hosts)
