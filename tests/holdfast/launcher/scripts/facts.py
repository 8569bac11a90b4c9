"""What a script can detect about its process."""

import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading

import heavy

NAMES = sorted(name for name in globals() if name.startswith("__"))


class Local:
    """An object that is pickled by reference to `__main__`."""


def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def descriptors():
    return [int(entry.name) for entry in list(pathlib.Path("/proc/self/fd").iterdir()) if entry.exists()]


facts = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "flags": list(sys.flags),
    "path": sys.path,
    "name": __name__,
    "file": __file__,
    "names": NAMES,
    "package": __package__,
    "spec": getattr(__spec__, "name", ""),
    "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__,
    "main": sys.modules["__main__"] is sys.modules[Local.__module__],
    "pickled": pickle.loads(pickle.dumps(Local)) is Local,  # noqa: S301  (its own words)
    "environ": {
        name: value for name, value in os.environ.items() if name not in {"HOLDFAST_OUT", "HOLDFAST_PROCESS_MARK"}
    },
    "native": subprocess.check_output(["printenv", "HOLDFAST_GIVEN"], text=True),
    "folder": str(pathlib.Path.cwd()),
    "stdin": str(pathlib.Path("/proc/self/fd/0").readlink()),
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through] for s in (sys.stdout, sys.stderr)],
    "descriptors": descriptors(),
    "signals": {n: str(signal.getsignal(n)) for n in range(1, 32)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "nice": os.nice(0),
    "policy": os.sched_getscheduler(0),
    "umask": os.umask(0o22),
    "own group": os.getpgrp() == os.getpid(),
    "death": death_signal(),
    "parent": os.getppid(),
    "comm": pathlib.Path("/proc/self/comm").read_text(),
    "threads": len(list(pathlib.Path("/proc/self/task").iterdir())),
    "main thread": threading.current_thread() is threading.main_thread(),
    "gc": [gc.isenabled(), gc.get_threshold()],
    "faulthandler": faulthandler.is_enabled(),
    "process": multiprocessing.current_process().name,
    "hooks": [sys.excepthook is sys.__excepthook__, sys.getrecursionlimit(), sys.meta_path.__len__()],
    "environ type": type(os.environ).__name__,
    "heavy": heavy.VALUE,
}
pathlib.Path(os.environ["HOLDFAST_OUT"]).write_text(json.dumps(facts))
