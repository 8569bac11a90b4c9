"""Writes the table of values into the chart's README: `python tools/chart_values.py FILE`, or `make generate`.

The rows are the `# --` comments of values.yaml, in the style of helm-docs, which is a Go program that set-up would
have to build. A comment belongs to the key below it: a single value, or a whole mapping, which then is one row.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

VALUES = Path(__file__).resolve().parents[1] / "charts" / "holdfast" / "values.yaml"
BEGIN, END = "<!-- values: `make generate` writes this table -->\n", "<!-- end of values -->"

Row = tuple[str, str, str]


def page(text: str, values: str) -> str:
    """Return the README with the table of these values."""
    head, _, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise SystemExit(f"the README has no section between {BEGIN.strip()} and {END}")
    table = "".join(f"| `{key}` | {default} | {meaning} |\n" for key, default, meaning in rows(values))
    return f"{head}{BEGIN}| value | default | meaning |\n|---|---|---|\n{table}{end}{tail}"


def rows(values: str) -> Iterator[Row]:
    """Yield key, default and meaning of each value. Raises ``SystemExit`` for a value without a meaning."""
    yield from _rows(yaml.compose(values), yaml.safe_load(values), values.splitlines(), "")


def _rows(mapping: yaml.Node, defaults: dict[str, object], lines: list[str], prefix: str) -> Iterator[Row]:
    for key, value in mapping.value:
        name, default = f"{prefix}{key.value}", defaults[key.value]
        if meaning := _comment(lines, key.start_mark.line):
            yield name, _shown(default), _escaped(meaning)
        elif isinstance(value, yaml.MappingNode) and isinstance(default, dict) and default:
            yield from _rows(value, default, lines, f"{name}.")
        else:
            raise SystemExit(f"values.yaml:{key.start_mark.line + 1}: {name} has no comment that begins with '# --'")


def _comment(lines: list[str], line: int) -> str:
    """Return the text after the last `# --` of the comment directly above a line."""
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    text = " ".join(row.strip().lstrip("# ") if "# --" not in row else row.strip() for row in lines[first:line])
    return re.sub(r"\s+", " ", text.rpartition("# -- ")[2]) if "# -- " in text else ""


def _shown(default: object) -> str:
    """Return JSON as `--set-json` takes it; an empty string for an empty value."""
    return f"`{_escaped(json.dumps(default, ensure_ascii=False))}`" if default not in ("", [], {}) else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(page(target.read_text(), VALUES.read_text()))
