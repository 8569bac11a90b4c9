"""The cluster's control groups, on hosts with cgroup v1, v2, or both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.errors import TestbedError
from holdfast_testbed.waiting import wait_for

_MOUNTS = Path("/proc/self/mountinfo")
_REQUIRED = frozenset({"cpu", "cpuset", "memory", "pids"})


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    mount: Path
    version: int
    controllers: frozenset[str]


def parse_hierarchies(mountinfo: str) -> list[Hierarchy]:
    """Return the cgroup trees of a `/proc/PID/mountinfo`."""
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            mount = Path(left.split()[4])
            found.append(
                Hierarchy(
                    mount=mount, version=2 if kind == "cgroup2" else 1, controllers=frozenset(options.split(","))
                )
            )
    return found


def hierarchies() -> list[Hierarchy]:
    """Return the cgroup trees of this machine."""
    return parse_hierarchies(_MOUNTS.read_text())


def create(name: str) -> None:
    """Create the group `name` (a path relative to the root) in every tree that a kubelet uses."""
    for tree in hierarchies():
        if tree.version == 2:
            _delegate(tree.mount, name)
        folder = tree.mount / name
        folder.mkdir(parents=True, exist_ok=True)
        if "cpuset" in tree.controllers:
            _inherit_cpuset(tree.mount, name)


def _delegate(mount: Path, name: str) -> None:
    """Delegate every controller of the root to `name` and its children."""
    here = mount
    for part in ("", *Path(name).parts):
        here = here / part if part else here
        here.mkdir(exist_ok=True)
        for controller in (here / "cgroup.controllers").read_text().split():
            hand_down(here, controller)


def hand_down(group: Path, controller: str) -> None:
    """Enable a controller for the child groups. Only a controller that a kubelet requires raises an error."""
    try:
        (group / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError as error:
        if controller in _REQUIRED:
            raise TestbedError(
                f"the controller '{controller}' cannot be used below {group} ({error.strerror}). In a container with "
                "cgroup v2, move its processes into a group of their own first, or run on the host."
            ) from error


def _inherit_cpuset(mount: Path, name: str) -> None:
    """Copy the cpuset of the parent: on v1 a new cpuset is empty, and no process can run in it."""
    parent = mount
    for part in Path(name).parts:
        here = parent / part
        for file in ("cpuset.cpus", "cpuset.mems"):
            if not (here / file).read_text().strip():
                (here / file).write_text((parent / file).read_text())
        parent = here


def remove(name: str, *, seconds: float = 20.0) -> None:
    """Remove the group `name` and all below it, once its processes are gone."""
    for tree in hierarchies():
        top = tree.mount / name
        if top.is_dir():
            wait_for(lambda top=top: _removed(top), what=f"control group {top} is empty", seconds=seconds)  # type: ignore[misc]


def _removed(top: Path) -> bool:
    try:
        for folder, _, _ in os.walk(top, topdown=False):
            Path(folder).rmdir()
    except FileNotFoundError:
        return not top.exists()
    except OSError:
        return False
    return True


def group_of(pid: int) -> list[str]:
    """Return the paths of the groups of a process; empty if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [line.split(":", 2)[2] for line in lines]
