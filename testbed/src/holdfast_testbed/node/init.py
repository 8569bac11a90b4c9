"""The first process of a node, PID 1 of its namespaces: it mounts, starts the node's programs and reaps processes.

It is started by `python -m holdfast_testbed.node.init BOOT.json`. When it is killed, the kernel ends everything in
the node, as a power failure does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast_testbed.build.commands import run
from holdfast_testbed.constants import METADATA_ADDRESS, METADATA_PORT
from holdfast_testbed.errors import CommandFailedError
from holdfast_testbed.fakes.metadata import Announcement, Instance, MetadataServer
from holdfast_testbed.node.config import CONTAINERD_SOCKET, SYSCTLS

_RESTART_SECONDS = 1.0


def main(boot_file: str) -> None:
    """Boot the node and never return."""
    boot = json.loads(Path(boot_file).read_text())
    socket.sethostname(boot["name"])
    _mount_disk(Path(boot["disk"]), boot["private"])
    _mount_kernel_files(Path("/run/kernel"))
    _mount_runtime(boot["runtime"])
    _configure_network()
    _serve_metadata(Path(boot["announcement"]))
    Supervisor(boot).run()


def _mount_disk(disk: Path, private: list[str]) -> None:
    """Mount the node's own folders over the host's. `/run` is empty at each boot, as after a power loss."""
    _forget_namespaces()
    for folder in private:
        mine = disk / folder.strip("/").replace("/", "-")
        mine.mkdir(parents=True, exist_ok=True)
        run(["mount", "--bind", mine, folder])
    run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"])
    for folder in ("/run/lock", "/run/netns", "/run/kernel", "/run/containerd"):
        Path(folder).mkdir()


def _forget_namespaces() -> None:
    """Drop the copies of the host's named network namespaces, which would keep those of other clusters alive.

    A namespace may disappear meanwhile if its cluster is removed.
    """
    for point in _named_namespaces():
        try:
            run(["umount", "--lazy", point])
        except CommandFailedError:
            if point in _named_namespaces():
                raise


def _named_namespaces() -> list[str]:
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [point for point in points if point.startswith("/run/netns/")]


def _mount_kernel_files(folder: Path) -> None:
    """Mount files over kernel settings that belong to the whole machine, and a new boot ID."""
    values = {f"/proc/sys/{name}": value for name, value in SYSCTLS.items()}
    values["/proc/sys/kernel/random/boot_id"] = str(uuid.uuid4())
    values["/etc/machine-id"] = uuid.uuid5(uuid.NAMESPACE_DNS, socket.gethostname()).hex
    for number, (target, value) in enumerate(values.items()):
        if Path(target).exists():
            mine = folder / str(number)
            mine.write_text(value + "\n")
            run(["mount", "--bind", mine, target])


def _mount_runtime(pairs: list[list[str]]) -> None:
    """Mount the host's interpreter and libraries read-only, for the hostPath volumes of pods."""
    for source, target in pairs:
        run(["mount", "--bind", source, target])
        run(["mount", "-o", "remount,bind,ro", target])


def _configure_network() -> None:
    for name in ("ipv4/ip_forward", "bridge/bridge-nf-call-iptables"):
        path = Path("/proc/sys/net") / name
        if path.exists():
            path.write_text("1")


def _serve_metadata(announcement: Path) -> None:
    def told() -> Announcement:
        return Announcement.read(announcement)

    def now() -> datetime:
        return told().clock(datetime.now(UTC))

    service = Instance(told, now)
    MetadataServer(service, address=METADATA_ADDRESS, port=METADATA_PORT, now=now, told=lambda: told().fault).start()


class Supervisor:
    """Starts the node's programs in order, restarts those that end, and reaps every orphan of the node."""

    def __init__(self, boot: dict[str, Any]) -> None:
        self._boot = boot
        self._running: dict[int, str] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        """Reap children forever. Another thread starts the programs."""
        threading.Thread(target=self._boot_up, name="boot", daemon=True).start()
        while True:
            try:
                pid, _ = os.waitpid(-1, 0)
            except ChildProcessError:
                time.sleep(0.05)
                continue
            with self._lock:
                name = self._running.pop(pid, None)
            if name is not None:
                threading.Timer(_RESTART_SECONDS, self._start, [name]).start()

    def _boot_up(self) -> None:
        self._start("containerd")
        _until(lambda: _connects(socket.AF_UNIX, CONTAINERD_SOCKET))
        self._start("import-pause")
        _until(lambda: _connects(socket.AF_INET, tuple(self._boot["api"])))
        self._start("kubelet")
        self._start("kube-proxy")

    def _start(self, name: str) -> None:
        part = self._boot["parts"][name]
        log = Path(part["log"]).open("ab")  # noqa: SIM115
        with log, self._lock:
            pid = _spawn(part["argv"], log.fileno())
            if part["restart"]:
                self._running[pid] = name


def _spawn(argv: list[str], log: int) -> int:
    """Start a program without `subprocess`, which would reap it itself."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
    ]
    return os.posix_spawn(argv[0], argv, os.environ, file_actions=actions)


def _connects(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


def _until(condition: Any) -> None:
    while not condition():
        time.sleep(0.05)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"the node does not boot: {error}")
