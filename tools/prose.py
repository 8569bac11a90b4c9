"""Checks texts that users read: no term that the project avoids, and no sentence of more than 30 words.

`prose.py` prints `file:line: problem` for each problem and then exits with 1. It reads Markdown pages, CRD
descriptions, chart values, alert texts, and, from the sources, the `--help` texts of `holdfast`.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST_SENTENCE = 30
TERMS = {
    r"anew": "again, recreated",
    r"beside": "in addition to, alongside, next to",
    r"committed steps?": "completed step",
    r"damaged?": "corrupt, corruption",
    r"for good": "permanently",
    r"go(?:es)? on\b(?! (?:the|a|an)\b)": "continues",
    r"heard of": "reported",
    r"hurts?": "failed, injected a fault into",
    r"in vain": "without success",
    r"lineage|lineup": "train state, world entry",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"nobody|somebody|whoever": "the component or the person",
    r"stands? by": "is on standby",
    r"tells?|told": "reports, logs, sends",
}
"""Avoided term → term to write instead."""
HELP = (
    "trainer_lib/src/holdfast/cli/",
    "trainer_lib/src/holdfast/core/",
    "trainer_lib/src/holdfast/launcher/options",
)
"""Sources that declare options and settings."""
_AVOIDED = {re.compile(rf"\b(?:{term})\b", re.IGNORECASE): better for term, better in TERMS.items()}
_YAML_TEXT = re.compile(
    r"^\s*(?:-\s*)?(?:description|summary|message):\s*(?P<text>[^|>].*)$|^\s*#+ ?-{0,2} ?(?P<comment>.*)$"
)
_YAML_BLOCK = re.compile(r"^(?P<margin>\s*(?:-\s*)?)(?:description|summary|message):\s*[|>]")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs)\.")


def main() -> int:
    """Check all files, and return the exit status."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout.split("\0")
    files = [name for name in listed if name.endswith(".md") or _is_yaml_for_users(name) or _has_help(name)]
    found = [problem for name in files for problem in problems(name, Path(name).read_text())]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


def _is_yaml_for_users(name: str) -> bool:
    return name.startswith(("charts/holdfast/rules/", "crds/")) or name == "charts/holdfast/values.yaml"


def _has_help(name: str) -> bool:
    return name.startswith(HELP) and name.endswith(".py") and Path(name).exists()


def problems(name: str, text: str) -> Iterator[str]:
    """Yield each problem of a file, with its line."""
    readers = {".md": markdown_paragraphs, ".py": help_paragraphs}
    paragraphs = readers.get(Path(name).suffix, yaml_paragraphs)(text)
    for number, paragraph in paragraphs:
        for avoided, better in _AVOIDED.items():
            for match in avoided.finditer(paragraph):
                yield f"{name}:{number}: '{match[0]}': write {better}"
        for sentence in sentences(paragraph):
            if len(sentence.split()) > LONGEST_SENTENCE:
                yield f"{name}:{number}: a sentence of {len(sentence.split())} words: '{sentence[:60]}…'"


def markdown_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, list items and table cells with their first line number, without code and link targets."""
    lines: list[str] = []
    first, fenced = 1, False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        silent = fence or fenced or not line.strip()
        if lines and (silent or re.match(r"\s*(?:[-*|#>]|\d+\.)\s|\|", line)):
            yield first, _plain(" ".join(lines))
            lines = []
        if silent:
            continue
        if line.lstrip().startswith("|"):
            yield from ((number, _plain(cell)) for cell in line.split("|") if cell.strip())
            continue
        first = first if lines else number
        lines.append(line.strip())


def yaml_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield descriptions, summaries, messages and comments with the number of their first line."""
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if found := _YAML_BLOCK.match(line):
            yield number, _plain(_block(lines[number:], len(found["margin"])))
        elif found := _YAML_TEXT.match(line):
            yield number, _plain((found["text"] or found["comment"] or "").strip("\"'"))


def _block(lines: list[str], margin: int) -> str:
    """Return the lines until the first one that is not indented by more than `margin`, as one."""

    def is_inside(line: str) -> bool:
        return not line.strip() or len(line) - len(line.lstrip()) > margin

    return " ".join(line.strip() for line in itertools.takewhile(is_inside, lines))


def help_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the texts that argparse prints: `help=` and similar, the third argument of `setting()`, `…_HELP`."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name("setting"), args=[_, _, meaning, *_], keywords=keywords):
                values: list[ast.expr] = [meaning, *(one.value for one in keywords if one.arg == "shown")]
            case ast.Call(keywords=keywords):
                values = [one.value for one in keywords if one.arg in {"help", "description", "epilog"}]
            case ast.Assign(targets=[ast.Name(name)], value=value) if name.endswith("_HELP"):
                values = list(ast.walk(value))  # type: ignore[arg-type]
            case _:
                continue
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, _plain(value.value)


def _plain(text: str) -> str:
    text = re.sub(r"^(?:[-*>#]+|\d+\.)\s+", "", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return _ABBREVIATION.sub("such as", text)


def sentences(paragraph: str) -> list[str]:
    """Split after a full stop, a question mark, a colon or a semicolon that is followed by a space."""
    return [sentence for sentence in re.split(r"(?<=[.?!:;])\s+", paragraph) if sentence]


if __name__ == "__main__":
    sys.exit(main())
