"""Change the sources in one place at a time, and count the changes that no test detects.

    python tools/mutants.py [--count 200] [--seed 1] [--streams 2]

The mutations are a random sample from the modules of `SUITES`: the decisions that must not be wrong. Each one runs
the tests of its module until one fails: first those of `make test`, then those of `make test-thorough`. The sources
are copied, and stay as they are. The table at the end says which part detected how many. The exit status is 0 even if
mutations survive: many are equivalent to the original, so each survivor needs to be read.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("operator/src", "trainer_lib/src")
LIBRARY = "trainer_lib/src/holdfast"
SUITES: Final = {
    "operator/src/holdfast_operator/decision": ("tests/holdfast_operator/decision",),
    f"{LIBRARY}/launcher/membership": ("tests/holdfast/launcher/membership", "tests/holdfast/model/test_model.py"),
    f"{LIBRARY}/checkpoint/policy": (
        "tests/holdfast/checkpoint/policy",
        "tests/holdfast/checkpoint/test_manager_claims.py",
    ),
    f"{LIBRARY}/checkpoint/restore": (
        "tests/holdfast/checkpoint/restore",
        "tests/holdfast/checkpoint/saving",
        "tests/holdfast/checkpoint/test_manager.py",
    ),
    f"{LIBRARY}/training/protocol": ("tests/holdfast/training/protocol", "tests/holdfast/model/test_step_machine.py"),
}
"""Folder of modules → the tests that must detect a mutation in it."""
PARTS = {"make test": "not thorough", "make test-thorough": "thorough"}
SURVIVED = "no test"
SECONDS = 600.0
"""For one part of one suite. A mutation that makes a test hang is detected."""
OPPOSITE: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change of one source file. `start` and `end` are byte offsets."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} → {self.after}"

    def apply(self, folder: Path) -> None:
        """Write the changed file below `folder`, which has the layout of the repository."""
        text = (ROOT / self.file).read_bytes()
        (folder / self.file).write_bytes(text[: self.start] + self.after.encode() + text[self.end :])

    def undo(self, folder: Path) -> None:
        shutil.copyfile(ROOT / self.file, folder / self.file)


def mutations(file: str, text: str) -> Iterator[Mutation]:
    """Yield each possible change of a source file."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in expressions(ast.parse(text)):
        before = ast.unparse(node)
        for changed in changes(node):
            yield Mutation(
                file=file,
                line=node.lineno,
                start=starts[node.lineno - 1] + node.col_offset,
                end=starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0),
                before=before,
                after=f"({ast.unparse(changed)})",
            )


def expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of all functions, without annotations, decorators and the parts of f-strings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                yield from _below(statement)
        else:
            yield from expressions(node)


def _below(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.expr):
        yield node
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _below(child)


def changes(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the wrong forms of an expression."""
    match node:
        case ast.Compare(left, [operator], comparators) if type(operator) in OPPOSITE:
            yield ast.Compare(left, [OPPOSITE[type(operator)]()], comparators)
        case ast.BoolOp(ast.And(), values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield ast.Call(ast.Name("bool"), [operand], [])
        case ast.BinOp(left, ast.Add(), right):
            yield ast.BinOp(left, ast.Sub(), right)
        case ast.BinOp(left, ast.Sub(), right):
            yield ast.BinOp(left, ast.Add(), right)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Call(ast.Name("max"), arguments, keywords):
            yield ast.Call(ast.Name("min"), arguments, keywords)
        case ast.Call(ast.Name("min"), arguments, keywords):
            yield ast.Call(ast.Name("max"), arguments, keywords)


def sample(count: int, seed: int) -> list[Mutation]:
    """Draw mutations from all modules of the suites, without a preference."""
    files = [path for folder in SUITES for path in sorted((ROOT / folder).rglob("*.py"))]
    every = [one for path in files for one in mutations(str(path.relative_to(ROOT)), path.read_text())]
    return random.Random(seed).sample(every, min(count, len(every)))  # noqa: S311 - a sample, no secret


def detected_by(mutation: Mutation, folder: Path) -> str:
    """Return the part of the tests that fails on a mutation; `SURVIVED` if none does."""
    mutation.apply(folder)
    try:
        for part, marks in PARTS.items():
            if not passes(folder, tests_of(mutation.file), marks):
                return part
        return SURVIVED
    finally:
        mutation.undo(folder)


def tests_of(file: str) -> list[str]:
    """Return the tests of a module: those with its name first, then those of its folder, then all of its suite."""
    folder, suite = next((folder, tests) for folder, tests in SUITES.items() if file.startswith(f"{folder}/"))
    own = (path for tests in suite for path in sorted((ROOT / tests).rglob(f"test_{Path(file).stem}*.py")))
    beside = (ROOT / suite[0] / Path(file).relative_to(folder)).parent
    near = [beside] if beside.is_dir() else []
    return [*(str(path.relative_to(ROOT)) for path in (*own, *near)), *suite]


def passes(folder: Path, tests: list[str], marks: str) -> bool:
    """Whether the tests with these marks pass on the sources below `folder`."""
    words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", marks]  # in the order of `tests`
    command = [sys.executable, "-m", "pytest", *words, *tests]
    environment = os.environ | {"PYTHONPATH": ":".join(str(folder / source) for source in SOURCES)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, 5)  # 5: no test has this mark


def judged(drawn: list[Mutation], scratch: Path, streams: int) -> Iterator[tuple[Mutation, str]]:
    """Yield each mutation with the part of the tests that detects it. Each stream has a copy of the sources."""
    free: Queue[Path] = Queue()
    for number in range(streams):
        for source in SOURCES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, scratch / str(number) / source, ignore=ignored)
        free.put(scratch / str(number))

    def judge(mutation: Mutation) -> tuple[Mutation, str]:
        folder = free.get()
        try:
            return mutation, detected_by(mutation, folder)
        finally:
            free.put(folder)

    with ThreadPoolExecutor(streams) as pool:
        yield from pool.map(judge, drawn)


def main() -> int:
    """Run the sample; the exit status."""
    parser = argparse.ArgumentParser(description="Count the wrong changes of the decisions that no test detects.")
    parser.add_argument("--count", type=int, default=200, help="number of mutations (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default 1)")
    parser.add_argument("--streams", type=int, default=2, help="mutations that run at the same time (default 2)")
    arguments = parser.parse_args()
    drawn = sample(arguments.count, arguments.seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        for number, (mutation, part) in enumerate(judged(drawn, Path(scratch), arguments.streams), start=1):
            found[part] += 1
            print(f"{number}/{len(drawn)} {part}: {mutation}", flush=True)
    print(f"\nof {len(drawn)} mutations (seed {arguments.seed}):")
    for part in (*PARTS, SURVIVED):
        print(f"{found[part]:5d} detected by {part}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
