"""The order of the tests: what needs a cluster comes last.

A cluster stands from the first test that needs it to the end of the session, and takes CPU all the time. Inside a
group the order is left as it is, so that shuffled tests stay shuffled.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent

Place = tuple[int, str, int, tuple[int, ...]]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> Place:
    """Tests that hand one running job on to the next come as they are written: each finds it as another left it."""
    fixtures = set(getattr(item, "fixturenames", ()))
    if "running_job" in fixtures:
        path, line, _ = item.location
        parameters = getattr(getattr(item, "callspec", None), "indices", {})
        return (4, path, line or 0, tuple(parameters.values()))
    folder = item.path.relative_to(HERE).parts[0]
    group = {"integration": 1, "e2e": 3 if "cluster" in fixtures else 2}.get(folder, 0)
    return (group, "", 0, ())
