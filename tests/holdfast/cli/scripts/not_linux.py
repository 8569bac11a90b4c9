"""Use Holdfast in the given folder without the names that only Linux has.

Third-party packages are imported earlier, because they have builds of their own for other systems.
"""

import contextlib
import ctypes
import fcntl
import importlib
import mmap
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
import time

import torch
import torch.distributed

MISSING = {
    fcntl: ("F_OFD_", "F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS", "F_SEAL", "F_NOTIFY", "F_SETLEASE"),
    mmap: ("MADV_HUGE", "MADV_NOHUGE", "MADV_DONTF", "MADV_DONTD", "MADV_DOF", "MADV_REMOVE", "MAP_POPULATE"),
    os: (
        *("sched_", "SCHED_", "pidfd_", "memfd_", "MFD_", "posix_fa", "POSIX_FADV_", "eventfd", "EFD_", "getrandom"),
        *("GRND_", "splice", "copy_file_range", "getxattr", "setxattr", "fdatasync", "pipe2", "RWF_", "O_PATH"),
        *("O_TMPFILE", "O_NOATIME", "waitid", "P_PID", "P_ALL", "P_PGID", "WEXITED", "WNOWAIT"),
    ),
    resource: ("prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RT", "RLIMIT_SIGPENDING", "RUSAGE_THREAD"),
    select: ("epoll", "EPOLL"),
    signal: ("SIGRT", "pidfd_", "sigtimedwait", "sigwaitinfo", "SIGPOLL", "SIGPWR", "SIGSTKFLT", "SIGCLD"),
    socket: (
        *("SO_PEERCRED", "SO_PEERSEC", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "TCP_CORK", "SO_MARK"),
        *("SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "AF_PACKET", "SO_BINDTODEVICE", "SO_DOMAIN", "EAI_NODATA"),
    ),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"),
}


class CLibrary(ctypes.CDLL):
    """A C library without any of the functions that are called by name."""

    def __getattr__(self, name):
        raise AttributeError(f"symbol {name} not found")


sys.platform = "darwin"
del os.O_DIRECT
for module, starts in MISSING.items():
    for name in [name for name in dir(module) if name.startswith(starts)]:
        delattr(module, name)
ctypes.CDLL = ctypes.PyDLL = CLibrary

import holdfast  # noqa: E402
from holdfast.cli.main import main  # noqa: E402

for one in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
    if not one.name.endswith("__main__"):
        importlib.import_module(one.name)
for name in holdfast.__all__:
    assert getattr(holdfast, name).__name__ == name
assert [main(words) for words in ([], ["--help"], ["--version"])] == [0, 0, 0]
with contextlib.suppress(SystemExit):
    main(["run", "--help"])
assert [main([verb, "x"]) for verb in ("run", "demo", "chaos", "resume-check")] == [2, 2, 2, 2]

folder = sys.argv[1]
job = holdfast.init(checkpoint_dir=folder, checkpoint_interval=2)
model = torch.nn.Linear(512, 512)
job.manage(model=model, optimizer=torch.optim.AdamW(model.parameters()))
data = [torch.ones(512)] * 8
for batch in job.batches(data, global_batch_size=4, micro_batch_size=2, max_steps=3):
    job.step(model(batch).square().mean())
assert job.durable_step == 3
copy = f"{folder}-copy"
words = (["verify", folder], ["copy", folder, copy], ["diff", folder, copy], ["prune", folder, "--keep-last", "1"])
assert [main(["checkpoints", *word]) for word in words] == [0, 0, 0, 0]
