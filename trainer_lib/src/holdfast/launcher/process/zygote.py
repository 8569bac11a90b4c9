"""The child of the launcher that has loaded torch and the script's imports, and forks on demand.

It never starts a thread, runs a tensor operation or touches a GPU: what it has, every forked process has. A forked
process is handed to the launcher (the process between them ends at once), so that the zygote's death harms nobody.
Started as `python [options] -c BOOT ROLE FD script …`; in the role "warm" it does not fork, but stands by itself.
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

# `-c` and not `-m` or a path: neither the working directory nor this folder may shadow a module.
BOOT: Final = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); from holdfast.launcher.process.zygote import main; main()"
)
ZYGOTE: Final = "zygote"
WARM: Final = "warm"

# What the launcher asks for, each with one descriptor: the new process's own line.
FORK: Final = b"f"
FORK_WARM: Final = b"w"

# What the zygote says of itself, once.
IS_READY: Final = "ready"
IS_UNSAFE: Final = "unsafe"
IS_USELESS: Final = "useless"

_ADOPTION_POLL_SECONDS = 0.0002
_DESCRIPTORS = Path("/proc/self/fd")
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def main() -> None:
    """Serve the launcher. Returns only in a process that became the script, when the script is over."""
    role, descriptor, *words = sys.argv[1:]
    script = parse([*sys.orig_argv[: sys.orig_argv.index(BOOT) - 1], *words])
    if script is None:
        raise ValueError(f"not a script: {words}")
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
    """Say what came of the imports; where no fork would be sound or of use, that was all."""
    why = "" if loaded is None else _unsafe(loaded)
    state = IS_USELESS if loaded is None else IS_UNSAFE if why else IS_READY
    said = {"state": state, "why": why, "skipped": [] if loaded is None else loaded.skipped}
    freeze()
    line.sendall(json.dumps(said).encode() + b"\n")
    if state != IS_READY:
        os._exit(0)


def _unsafe(loaded: Loaded) -> str:
    """Why a forked process could hang or fail later; empty if nothing speaks against it."""
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
    """Libraries that can be forked end their threads before it (OpenBLAS); what is left then can not."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _serve(line: socket.socket, launcher: int) -> tuple[socket.socket, bool]:
    """Fork for each request; returns in the forked processes only, each with its own line."""
    while True:
        asked, descriptors, _, _ = socket.recv_fds(line, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not asked:
            os._exit(0)
        own = socket.socket(fileno=descriptors[0])
        if _fork(launcher):
            line.close()
            return own, asked == FORK_WARM
        own.close()  # where no process came to be, the launcher sees the line closed


def _fork(launcher: int) -> bool:
    """Make a process that is the launcher's child; True in that process."""
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
    """Die with the launcher from now on: a wish made before it is our parent would be for the middle process."""
    os.setpgid(0, 0)
    while os.getppid() == middle:
        time.sleep(_ADOPTION_POLL_SECONDS)
    die_with(launcher)
