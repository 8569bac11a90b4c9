"""Parses a command and the imports of its script, from words and source code: nothing is executed.

Only `python [options] script.py …` and `python [options] -m module …` are supported; `parse` returns None for
anything else. The user's own code is read, never run: its imports are followed to installed packages.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from holdfast.core.environment import PLACE_PREFIXES, PLACE_VARIABLES

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?t?")
_FLAGS = frozenset("bBdEIOPqRsSuv")  # options of the interpreter without a value
_VALUED = frozenset("WX")
_SURFACE = frozenset({"init", "Trainer"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_MAX_FILES = 1000


@dataclass(frozen=True, kw_only=True)
class Script:
    """A command that runs Python code."""

    interpreter: str
    options: tuple[str, ...]
    target: str  # a path, or a module's dotted name
    is_module: bool
    arguments: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The words after the interpreter's options."""
        return ("-m", self.target, *self.arguments) if self.is_module else (self.target, *self.arguments)


@dataclass(frozen=True, kw_only=True, order=True)
class Import:
    """One absolute import: the module, and the names that are imported from it."""

    module: str
    names: tuple[str, ...] = ()

    @property
    def top(self) -> str:
        """The top-level package."""
        return self.module.partition(".")[0]


def parse(argv: Sequence[str]) -> Script | None:
    """Parse a command; None if it runs no Python script or module."""
    if not argv or _PYTHON.fullmatch(Path(argv[0]).name) is None:
        return None
    at = 1
    while at < len(argv) and argv[at].startswith("-"):
        rest, takes = _options(argv[at])
        if takes == "?":
            return None
        if takes == "m":
            words = [*([rest] if rest else []), *argv[at + 1 :]]
            return _script(argv, at, words, is_module=True, attached=argv[at][: -len(rest) - 1 if rest else -1])
        at += 2 if takes and not rest else 1
    return _script(argv, at, argv[at:], is_module=False)


def _options(argument: str) -> tuple[str, str]:
    """Parse one word of options: return the rest and the option that takes it ("": none, "?": unsupported)."""
    for place, letter in enumerate(argument[1:], start=2):
        if letter in _VALUED or letter == "m":
            return argument[place:], letter
        if letter not in _FLAGS:
            return "", "?"
    return "", "" if len(argument) > 1 else "?"


def _script(
    argv: Sequence[str], at: int, words: Sequence[str], *, is_module: bool, attached: str = "-"
) -> Script | None:
    if not words:
        return None
    return Script(
        interpreter=argv[0],
        options=(*argv[1:at], *([attached] if len(attached) > 1 else [])),
        target=words[0],
        is_module=is_module,
        arguments=tuple(words[1:]),
    )


def source_file(script: Script, path: Sequence[str]) -> Path | None:
    """Return the file that will be `__main__`; `path` is the module search path."""
    if not script.is_module:
        file = Path(script.target)
        return file if file.is_file() else None
    for name in (f"{script.target}.__main__", script.target):
        spec = _find(name, path)
        if spec is not None and spec.has_location and spec.origin and spec.submodule_search_locations is None:
            return Path(spec.origin)
    return None


def speaks(argv: Sequence[str]) -> bool:
    """Whether the main script has Holdfast's loop: it uses `holdfast.init` or `holdfast.Trainer`."""
    tree = _main_tree(argv)
    return tree is not None and _uses_surface(tree)


def reads_rank_variables(argv: Sequence[str]) -> bool:
    """Whether the main script names a variable that torchrun sets for a process, for example LOCAL_RANK.

    Such a script must not start before its world is known.
    """
    tree = _main_tree(argv)
    return tree is not None and any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in PLACE_VARIABLES
        for node in ast.walk(tree)
    )


def is_rank_variable(variable: str) -> bool:
    """Whether an environment variable depends on the rank; all others are the same for all ranks."""
    return variable in PLACE_VARIABLES or variable.startswith(PLACE_PREFIXES)


def imports(source: str | bytes) -> tuple[Import, ...]:
    """Return the absolute imports at module level of this source, without handlers of a `try`."""
    tree = _tree(source)
    return () if tree is None else tuple(_absolute(tree, package=""))


def installed_imports(main: Path, path: Sequence[str]) -> tuple[Import, ...]:
    """Return what `main` imports from installed packages and the standard library, also through the user's own files.

    The user's own files are those outside of site-packages. They may read the rank when they are imported, so they
    are never run ahead of time.
    """
    return tuple(_Walk(path).follow(main))


def _main_tree(argv: Sequence[str]) -> ast.Module | None:
    script = parse(argv)
    file = None if script is None else source_file(script, [str(Path.cwd()), *sys.path])
    return None if file is None else _tree_of(file)


def _tree_of(file: Path) -> ast.Module | None:
    try:
        return _tree(file.read_bytes())
    except OSError:
        return None


def _tree(source: str | bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # running the script will report it
        return None


def _uses_surface(tree: ast.Module) -> bool:
    nodes = list(ast.walk(tree))
    modules = {
        alias.asname or "holdfast"
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "holdfast" or (alias.asname is None and alias.name.startswith("holdfast."))
    }
    taken = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "holdfast"
        for alias in node.names
        if alias.name in _SURFACE
    }
    return any(_is_use(node, modules, taken) for node in nodes)


def _is_use(node: ast.AST, modules: set[str], taken: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _SURFACE and isinstance(node.value, ast.Name) and node.value.id in modules
    return isinstance(node, ast.Name) and node.id in taken


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports at module level, in order."""
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.If():
                if not _type_checking(node.test):
                    yield from _statements(node.body)
                yield from _statements(node.orelse)
            case ast.Try() | ast.TryStar():
                yield from _statements([*node.body, *node.orelse, *node.finalbody])
            case ast.With():
                yield from _statements(node.body)
            case _:
                pass


def _type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _absolute(tree: ast.Module, *, package: str) -> Iterator[Import]:
    """Yield every import by its absolute name. A relative import needs `package`, and is skipped without it."""
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            yield from (Import(module=alias.name) for alias in node.names)
            continue
        module = _resolved(node, package)
        if module:
            names = tuple(alias.name for alias in node.names if alias.name != "*")
            yield Import(module=module, names=names)


def _resolved(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    if not package or node.level > len(parts):
        return ""
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Find a module without importing its parent packages."""
    where: Sequence[str] = path
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), where)
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None
        where = list(spec.submodule_search_locations or ())
    return spec


@dataclass
class _Walk:
    """Reads the user's own files, each once, in the order of their import."""

    path: Sequence[str]
    _seen: set[str] = field(default_factory=set)
    _yielded: set[Import] = field(default_factory=set)

    def follow(self, file: Path, package: str = "") -> Iterator[Import]:
        """Yield what this file, and the files that it imports, import from installed packages."""
        if str(file) in self._seen or len(self._seen) >= _MAX_FILES:
            return
        self._seen.add(str(file))
        tree = _tree_of(file) if file.suffix == ".py" or not package else None
        for wanted in () if tree is None else _absolute(tree, package=package):
            if self._is_installed(wanted.top):
                yield from self._once(wanted)
            else:
                yield from self._own(wanted)

    def _once(self, wanted: Import) -> Iterator[Import]:
        if wanted not in self._yielded:
            self._yielded.add(wanted)
            yield wanted

    def _is_installed(self, top: str) -> bool:
        if top == "holdfast" or top in sys.stdlib_module_names:
            return True
        spec = PathFinder.find_spec(top, self.path)
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        return any(_INSTALLED & set(Path(place).parts) for place in places)

    def _own(self, wanted: Import) -> Iterator[Import]:
        """Yield the imports of a user's module. The `__init__` of its packages runs first; names may be modules."""
        parts = wanted.module.split(".")
        names = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        for name in [*names, *(f"{wanted.module}.{name}" for name in wanted.names)]:
            spec = _find(name, self.path)
            if spec is not None and spec.has_location and spec.origin:
                is_package = spec.submodule_search_locations is not None
                package = name if is_package else name.rpartition(".")[0]
                yield from self.follow(Path(spec.origin), package)
