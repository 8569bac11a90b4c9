"""The page of reasons is made from the operator's enums, and has each member with its meaning."""

from __future__ import annotations

import subprocess
import sys
from enum import EnumType
from pathlib import Path

from holdfast_operator.api import reasons

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "reasons.md"
PARTS = {"Basis"}
"""Only the end of a decision's reason."""


def test_the_page_is_the_one_that_the_generator_makes(tmp_path: Path) -> None:
    made = tmp_path / "page.md"
    subprocess.run([sys.executable, ROOT / "tools" / "reasons.py", made], check=True)
    assert made.read_text() == PAGE.read_text(), "run 'make generate'"


def test_each_reason_is_on_the_page_with_its_meaning() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    shown = {cells[0].strip("| `") for cells in rows if cells[1].strip()}
    enums = [
        enum for name, enum in vars(reasons).items() if isinstance(enum, EnumType) and name not in {*PARTS, "StrEnum"}
    ]
    assert {str(member) for enum in enums for member in enum} == shown
