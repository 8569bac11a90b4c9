"""docs/reference/metrics.md and what is exported agree, in both directions: name, type and labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.launcher.membership.state import Phase
from holdfast_sidecar.metrics.launcher import PHASES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^\| `(holdfast_\w+)` \| (\w+)(?: (`[^|]*`))? \|", re.MULTILINE)

Series = dict[str, tuple[str, frozenset[str]]]


def documented(section: str) -> Series:
    """Name → type and labels, from the table of one section."""
    text = PAGE.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(text)}


def test_the_operators_series_are_those_of_the_page(operator, series):
    assert series(operator) == documented("Operator")


def test_the_sidecars_own_series_are_those_of_the_page(sidecar, series):
    assert series(sidecar.metrics) == documented("Sidecar") | documented("GPUs")


def test_the_launchers_series_are_those_of_the_page(sidecar, series):
    before = series(sidecar.metrics)
    sidecar.live()
    after = series(sidecar.metrics)
    assert {name: after[name] for name in after.keys() - before.keys()} == (
        documented("Launcher") | documented("A job's time")
    )


@pytest.mark.parametrize("section", ["Operator", "Sidecar", "Launcher", "A job's time", "GPUs"])
def test_each_table_is_read(section):
    assert len(documented(section)) > 5


def test_one_name_means_one_thing(operator, sidecar, series):
    sidecar.live()
    assert series(operator).keys() & series(sidecar.metrics).keys() == set()


def test_the_phases_are_those_of_the_launcher():
    assert set(PHASES) == set(Phase)


def test_names_and_labels_follow_prometheus(operator, sidecar, series):
    sidecar.live()
    for name, (kind, labels) in (series(operator) | series(sidecar.metrics)).items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert not labels & {"job", "instance"}, f"{name}: Prometheus sets these labels"
        assert not name.endswith("age_seconds"), f"{name}: export a timestamp"
