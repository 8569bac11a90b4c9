"""Processes of pods, seen from the host: a pod's control group has its UID, and a container's its ID."""

from __future__ import annotations

from typing import Any

from holdfast_testbed.node import cgroups
from holdfast_testbed.node.processes import Process, command_line, everything

_STATUSES = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")


def container_names(pod: dict[str, Any]) -> dict[str, str]:
    """Return the container names by container ID."""
    statuses = [status for key in _STATUSES for status in pod.get("status", {}).get(key, [])]
    return {s["containerID"].split("://", 1)[1]: s["name"] for s in statuses if s.get("containerID")}


def container_of(groups: list[str], uid: str) -> str | None:
    """Return the container ID in a process's control groups, if the process belongs to the pod with this UID."""
    for group in groups:
        head, found, tail = group.partition(f"/pod{uid}/")
        if found and head:
            return tail.split("/", 1)[0]
    return None


def processes_of(pod: dict[str, Any]) -> list[Process]:
    """Return all processes of a pod that run now."""
    uid, names = pod["metadata"]["uid"], container_names(pod)
    found = []
    for stat in everything():
        container = container_of(cgroups.group_of(stat.pid), uid)
        if container is not None:
            found.append(
                Process(
                    pid=stat.pid,
                    ppid=stat.parent,
                    start=stat.start,
                    name=stat.name,
                    cmdline=tuple(command_line(stat.pid)),
                    container=names.get(container, ""),
                )
            )
    return found
