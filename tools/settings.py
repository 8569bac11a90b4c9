"""Writes the tables of docs/reference/holdfast-run.md from the declared settings: `python tools/settings.py FILE`.

The table after `<!-- options -->` lists the options, and the one after `<!-- variables -->` the variables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from holdfast.core.environment import SETTINGS
from holdfast.launcher.options import OPTIONS


def options() -> Iterable[str]:
    """Yield one row for each option."""
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for one in (*OPTIONS, *SETTINGS):
        if one.flag:
            yield f"| `{one.flag}` | {one.shown} | {one.meaning} |"


def variables() -> Iterable[str]:
    """Yield one row for each variable."""
    yield "| variable | read by | default | meaning |"
    yield "|---|---|---|---|"
    for one in SETTINGS:
        reader = "launcher and rank" if one.owner == "both" else one.owner
        meaning = f"as `{one.option}`" if one.option else one.meaning
        yield f"| `{one.variable}` | {reader} | {'' if one.option else one.shown} | {meaning} |"


def page(text: str) -> str:
    """Return the page with both tables generated again."""
    for name, rows in (("options", options()), ("variables", variables())):
        table = f"<!-- {name} -->\n" + "\n".join(rows) + "\n"
        text = re.sub(rf"<!-- {name} -->\n(?:\|.*\n)*", lambda _, table=table: table, text)
    return text


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
