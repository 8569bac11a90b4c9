"""Finds the parts of a Python program on this machine: interpreter, standard library, packages, shared libraries."""

from __future__ import annotations

import importlib.util
import marshal
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from holdfast_testbed.build.image_archive import Layer
from holdfast_testbed.settings import child_environment

HOME = "/opt/python"
SITE = "/opt/site"
_UNUSED = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages", "dist-packages",
     "__pycache__", "pydoc_data", "_tkinter", "distutils"}
)  # fmt: skip
_UNUSED_PACKAGES = ("kubernetes/aio/",)
"""Parts that no program of this repository loads: a third of the operator's image, which each node copies."""
_NEEDED_LIBRARY = re.compile(r"(?:=>\s*)?(/\S+)\s+\(0x")


def version() -> str:
    """Return the name with the version: `python3.11`."""
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def interpreter() -> Path:
    """Return the real interpreter behind the virtual environment."""
    return Path(sys._base_executable if hasattr(sys, "_base_executable") else sys.executable).resolve()


def requirements(project: Path) -> list[str]:
    """Return the distributions that a project's pyproject.toml requires."""
    return list(tomllib.loads(project.read_text())["project"].get("dependencies", []))


def closure(wanted: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the wanted distributions and all their dependencies, by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(Requirement(text), "") for text in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        extras = ["", *requirement.extras]
        if name in found and not requirement.extras:
            continue
        found[name] = metadata.distribution(name)
        waiting += [(Requirement(text), e) for text in found[name].requires or [] for e in extras]
    return dict(sorted(found.items()))


def add_interpreter(layer: Layer) -> None:
    """Add interpreter and standard library below `/opt/python`, with all shared libraries."""
    layer.data(f"{HOME}/bin/{version()}", interpreter().read_bytes(), 0o755)
    layer.link(f"{HOME}/bin/python", version())
    layer.link(f"{HOME}/bin/python3", version())
    root = Path(sysconfig.get_path("stdlib"))
    binaries = [interpreter()]
    for file in _files(root):
        add_file(layer, file, f"{HOME}/lib/{version()}/{file.relative_to(root)}")
        if ".so" in file.name:
            binaries.append(file)
    add_libraries(layer, binaries)


def add_distributions(layer: Layer, distributions: Iterable[metadata.Distribution]) -> None:
    """Add installed distributions below `/opt/site`, with their shared libraries."""
    binaries = []
    for distribution in distributions:
        for entry in distribution.files or []:
            source = Path(str(distribution.locate_file(entry)))
            if ".." in entry.parts or "__pycache__" in entry.parts or not source.is_file():
                continue
            if str(entry).startswith(_UNUSED_PACKAGES):
                continue
            add_file(layer, source, f"{SITE}/{entry}")
            if ".so" in entry.name:
                binaries.append(source)
    add_libraries(layer, binaries)


def add_tree(layer: Layer, root: Path, target: str) -> None:
    """Add a folder of sources."""
    for file in _files(root):
        add_file(layer, file, f"{target}/{file.relative_to(root)}")


def add_file(layer: Layer, source: Path, target: str) -> None:
    """Add a file, and for a module its compiled form next to it."""
    layer.copy(source, target)
    if source.suffix == ".py":
        compiled = compile_module(source.read_bytes(), target)
        if compiled is not None:
            name = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
            layer.data(f"{Path(target).parent}/__pycache__/{name}", compiled)


def compile_module(source: bytes, shown_as: str) -> bytes | None:
    """Return an unchecked `.pyc`. Python would discard one that checks times, because images have zeroed times."""
    try:
        code = compile(source, shown_as, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError):
        return None
    unchecked = (1).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + unchecked + importlib.util.source_hash(source) + marshal.dumps(code)


def add_libraries(layer: Layer, binaries: Iterable[Path]) -> None:
    """Add the shared libraries that these files need, each at its own path. Links are resolved by copying."""
    for library in sorted(set(_libraries(binaries))):
        if not layer.holds(library):
            layer.data(library, Path(library).read_bytes(), 0o755)


def _libraries(binaries: Iterable[Path]) -> Iterator[str]:
    for binary in binaries:
        shown = subprocess.run(
            ["ldd", str(binary)], capture_output=True, text=True, check=False, env=child_environment(LC_ALL="C")
        ).stdout
        yield from needed_libraries(shown)


def needed_libraries(ldd: str) -> list[str]:
    """Return the paths in the output of `ldd`."""
    return _NEEDED_LIBRARY.findall(ldd)


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        unused = path.name.partition(".")[0] in _UNUSED or path.name.startswith("config-")
        if unused or path.suffix in (".pyc", ".a", ".o"):
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.is_file():
            yield path
