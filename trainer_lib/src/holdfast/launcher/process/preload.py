"""The child's side of the pool: loads the script's imports, is on standby, then becomes `python script.py …`.

State that user code can distinguish from a fresh interpreter is reset: `sys.argv`, `__main__`, `sys.path`,
`os.environ`, the working directory, the streams, and all random generators. `/proc/self/cmdline` cannot be reset.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import socket
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

from holdfast.launcher.process.script_imports import Import, Script, installed_imports, is_rank_variable, source_file

# Messages between the launcher and a standby process.
READY: Final = b"ready\n"
ORDER: Final = b"!"  # comes with three descriptors: a memory file with environment and folder, stdout, stderr

_TORCH = frozenset({"torch", "holdfast"})
# Modules that every training script needs at some time: for example, the first AdamW() imports torch._dynamo.
_TRAINING = ("numpy", "torch", "torch.distributed", "torch._dynamo", "holdfast.training.init")
_PAUSE_AFTER_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.2
_COMM = Path("/proc/self/comm")
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, kw_only=True)
class Order:
    """The environment, folder and streams that a standby process must take over."""

    environ: Mapping[str, str]
    folder: str
    stdout: int
    stderr: int


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The result of loading modules ahead of time."""

    skipped: tuple[tuple[str, str], ...] = ()  # the module, and why
    threaded: tuple[str, ...] = ()  # modules whose import left a thread behind


class _ReadsRankVariablesError(BaseException):
    """A module read its rank while it was imported. This is no Exception, so that no `except Exception` hides it."""


@dataclass
class Program:
    """The script that this process will run, and the state of the interpreter at its start."""

    script: Script
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    comm: str = field(default_factory=lambda: _COMM.read_text().rstrip("\n"))

    @property
    def file(self) -> Path | None:
        """The file of the script; None if there is none."""
        return source_file(self.script, sys.path)

    def pose(self) -> None:
        """Set `sys.argv`, `sys.path[0]` and `__main__` of the script, which modules may read on import."""
        name = self.script.target
        sys.orig_argv = [sys.executable, *self.script.options, *self.script.words]
        sys.argv = ["-m" if self.script.is_module else name, *self.script.arguments]
        if not sys.flags.safe_path:
            here = Path.cwd() if self.script.is_module else Path(name).resolve().parent
            sys.path.insert(0, str(here))
        sys.modules["__main__"] = _main_module("" if self.script.is_module else _absolute(name))

    def run(self) -> None:
        """Run the script as the interpreter would."""
        if self.script.is_module:
            runpy._run_module_as_main(self.script.target)  # type: ignore[attr-defined]
            return
        file = _absolute(self.script.target)
        try:
            source = Path(file).read_bytes()
        except OSError as error:
            print(
                f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr
            )
            sys.exit(2)
        code = compile(source, file, "exec", dont_inherit=True)
        exec(code, vars(sys.modules["__main__"]))  # noqa: S102  (the user's own script)


def become(program: Program, order: Order) -> None:
    """Become the script's process and run the script. An exception ends the process as it ends an interpreter."""
    _take_over(program, order)
    try:
        program.run()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  (the interpreter's own last resort)
        failure = error.with_traceback(_below_here(error.__traceback__))
    else:
        return
    _report(failure)


def load(program: Program) -> Loaded | None:
    """Import what the script imports, slowly, to leave CPU time to others; None if nothing useful is to load."""
    file = program.file
    wanted = () if file is None else installed_imports(file, sys.path)
    if all(entry.top in sys.stdlib_module_names for entry in wanted):
        return None
    skipped: dict[str, str] = {}
    threaded: list[str] = []
    trains = any(entry.top in _TORCH for entry in wanted)
    with _throttled_imports():
        if trains:
            _import_all(_TRAINING, skipped)
        with _rank_variables_hidden():
            for entry in wanted:
                before = threads()
                _import(entry, skipped)
                threaded += [entry.module] if threads() > before else []
        if not trains and "torch" in sys.modules:
            _import_all(_TRAINING, skipped)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise each forked process would write it again
    return Loaded(skipped=tuple(skipped.items()), threaded=tuple(threaded))


def threads() -> int:
    """Return the number of threads of this process, including those of libraries."""
    return len(list(_TASKS.iterdir()))


def stand_by(line: socket.socket, *, touch: bool) -> Order:
    """Wait for an order; exit when the launcher has ended. `touch`: first load what the first step needs."""
    if touch:
        _touch_group()
        line.sendall(READY)
    data, descriptors, _, _ = socket.recv_fds(line, len(ORDER), 3, socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)
    line.close()
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        order = json.loads(file.read())
    return Order(environ=order["environ"], folder=order["folder"], stdout=descriptors[1], stderr=descriptors[2])


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show for this process, at most 15 characters."""
    with contextlib.suppress(OSError):
        _COMM.write_text(name)


def freeze() -> None:
    """Exclude loaded objects from garbage collection, so that forked processes keep sharing their pages."""
    gc.collect()
    gc.disable()
    gc.freeze()


def _take_over(program: Program, order: Order) -> None:
    for source, target in ((order.stdout, 1), (order.stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    _fit_stdout()
    os.chdir(order.folder)
    # The interpreter adds these variables at its start (LC_CTYPE in the C locale), and would add them again.
    own = {name: value for name, value in program.environ.items() if name not in order.environ}
    os.environ.clear()
    os.environ.update({**order.environ, **own})
    name_process(program.comm)
    _reseed()
    gc.enable()


def _fit_stdout() -> None:
    """Buffer stdout by lines on a terminal, as a new interpreter does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())


def _reseed() -> None:
    """Reseed the random generators: processes of one zygote must not draw the same numbers."""
    import random

    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # not torch.seed(): it initialises CUDA
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _main_module(file: str) -> types.ModuleType:
    main = types.ModuleType("__main__")
    names: dict[str, Any] = {"__annotations__": {}, "__builtins__": sys.modules["builtins"]}
    if file:
        names |= {"__file__": file, "__cached__": None, "__loader__": SourceFileLoader("__main__", file)}
    vars(main).update(names)
    return main


def _absolute(name: str) -> str:
    """Make a script's name absolute as the interpreter does, which keeps `.` and `..`."""
    return os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118  (pathlib would normalise it)


def _below_here(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def _report(error: BaseException) -> NoReturn:
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)


def _import_all(modules: Sequence[str], skipped: dict[str, str]) -> None:
    for name in modules:
        _import(Import(module=name), skipped)


def _import(entry: Import, skipped: dict[str, str]) -> None:
    before = set(sys.modules)
    try:
        __import__(entry.module, fromlist=entry.names)
    except BaseException as error:  # noqa: BLE001  (sys.exit too: the script can handle it itself)
        skipped.setdefault(entry.module, f"{type(error).__name__}: {error}".rstrip(": "))
        _drop_halves(before)


def _drop_halves(before: set[str]) -> None:
    """Remove modules whose package failed after them, so that the next import starts again."""
    for name in sorted(set(sys.modules) - before):
        parents = [name[:at] for at, letter in enumerate(name) if letter == "."]
        if any(parent not in sys.modules for parent in parents):
            sys.modules.pop(name)


@contextlib.contextmanager
def _rank_variables_hidden() -> Iterator[None]:
    """Raise if a module reads the rank while it is imported: the value would be wrong in every process."""

    class Watched(type(os.environ)):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            if is_rank_variable(name):
                raise _ReadsRankVariablesError(f"it reads {name} during its import")
            return str(super().__getitem__(name))

    plain = type(os.environ)
    os.environ.__class__ = Watched
    try:
        yield
    finally:
        os.environ.__class__ = plain


class _ThrottledImports:
    """A finder that finds nothing. Before each import it sleeps for as long as the last imports took."""

    def __init__(self) -> None:
        self._since = time.process_time()

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        """Sleep."""
        spent = time.process_time() - self._since
        if spent > _PAUSE_AFTER_SECONDS:
            time.sleep(min(spent, _LONGEST_PAUSE_SECONDS))
            self._since = time.process_time()


@contextlib.contextmanager
def _throttled_imports() -> Iterator[None]:
    finder: Any = _ThrottledImports()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _touch_group() -> None:
    """Create and drop a local process group of one, to load its libraries before a recovery."""
    if "torch" not in sys.modules or not sys.modules["torch"].distributed.is_available():
        return
    import torch
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d  # its stubs are incomplete
    with contextlib.suppress(RuntimeError):  # no loopback or no gloo: the first real group will report it
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = c10d.ProcessGroupGloo(c10d.HashStore(), 0, 1, options)
        group.allreduce([torch.zeros(1, device="cpu")]).wait()
