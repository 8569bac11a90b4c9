"""The child of the launcher that has loaded torch and the script's imports, and forks on demand.

It never starts a thread, runs a tensor operation or opens a GPU, because every forked process would inherit that. A
forked process becomes a child of the launcher (the intermediate process ends at once), so the end of the zygote
affects no other process.

It is started as `python [options] -c BOOT ROLE FD script …`. In the role "warm" it does not fork, but is on standby
itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Final

from holdfast.launcher.process.child import die_with, mark_this_process
from holdfast.launcher.process.preload import Loaded, Program, become, freeze, load, name_process, stand_by, threads
from holdfast.launcher.process.script_imports import parse

# `-c`, not `-m` or a path: neither the working directory nor this folder may shadow a module.
BOOT: Final = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); from holdfast.launcher.process.zygote import main; main()"
)
ZYGOTE: Final = "zygote"
WARM: Final = "warm"

# Requests of the launcher, each with one descriptor: the socket of the new process.
FORK: Final = b"f"
FORK_WARM: Final = b"w"

# States that the zygote reports once.
IS_READY: Final = "ready"
IS_UNSAFE: Final = "unsafe"
IS_USELESS: Final = "useless"

_ADOPTION_POLL_SECONDS = 0.0002
_DESCRIPTORS = Path("/proc/self/fd")
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def main() -> None:
    """Serve the launcher. Returns only in a process that became the script, at the end of the script."""
    role, descriptor, *arguments = sys.argv[1:]
    script = parse([*sys.orig_argv[: sys.orig_argv.index(BOOT) - 1], *arguments])
    if script is None:
        raise ValueError(f"not a script: {arguments}")
    line = socket.socket(fileno=int(descriptor))
    line.set_inheritable(False)
    launcher = os.getppid()
    program = Program(script=script)
    program.pose()
    name_process(f"holdfast-{role}")
    loaded = load(program)
    if role == WARM:
        become(program, stand_by(line, touch=True))
        return
    _introduce(line, loaded)
    line, warm = _serve(line, launcher)
    name_process(f"holdfast-{WARM}")
    line.sendall(f"{os.getpid()} {mark_this_process()}\n".encode())
    become(program, stand_by(line, touch=warm))


def _introduce(line: socket.socket, loaded: Loaded | None) -> None:
    """Report the result of the imports. If forking is unsafe or useless, exit."""
    why = "" if loaded is None else _unsafe(loaded)
    state = IS_USELESS if loaded is None else IS_UNSAFE if why else IS_READY
    report = {"state": state, "why": why, "skipped": [] if loaded is None else loaded.skipped}
    freeze()
    line.sendall(json.dumps(report).encode() + b"\n")
    if state != IS_READY:
        os._exit(0)


def _unsafe(loaded: Loaded) -> str:
    """Return why a forked process could hang or fail later; empty if there is no reason."""
    _fork_nothing()
    if threads() > 1:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        what = ", ".join(loaded.threaded) or "an import"
        return f"{what} started {threads() - 1} threads {' '.join(names)}".rstrip()
    for entry in _DESCRIPTORS.iterdir():
        target = str(entry.readlink()) if entry.is_symlink() else ""
        if target.startswith(_GPU_DEVICES):
            return f"an import opened {target}"
    return ""


def _fork_nothing() -> None:
    """Fork once: libraries that support it end their threads before a fork (OpenBLAS). Others' threads remain."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _serve(line: socket.socket, launcher: int) -> tuple[socket.socket, bool]:
    """Fork for each request. Returns only in forked processes, each with its own socket."""
    while True:
        requested, descriptors, _, _ = socket.recv_fds(line, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not requested:
            os._exit(0)
        own = socket.socket(fileno=descriptors[0])
        if _fork(launcher):
            line.close()
            return own, requested == FORK_WARM
        own.close()  # if no process was created, the launcher sees the socket close


def _fork(launcher: int) -> bool:
    """Create a process that becomes a child of the launcher. Return True in that process."""
    try:
        middle = os.fork()
    except OSError:
        return False
    if middle:
        os.waitpid(middle, 0)
        return False
    middle = os.getpid()
    try:
        last = os.fork()
    except OSError:
        os._exit(1)
    if last:
        os._exit(0)
    _be_adopted(launcher, middle)
    return True


def _be_adopted(launcher: int, middle: int) -> None:
    """End with the launcher. Before adoption, the setting would refer to the intermediate process."""
    os.setpgid(0, 0)
    while os.getppid() == middle:
        time.sleep(_ADOPTION_POLL_SECONDS)
    die_with(launcher)
