"""The table of the demo states its promises, and one broken promise fails the demo."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.cli.demo.report import Check, CostLimit, Outcome, held, table

KEPT = Outcome(expected=CostLimit(fault="rank killed", seconds=3.0), noticed=0.1, next_step=0.4, lost=0)
WHOLE = Check(what="every sample exactly once", held=True)


def test_kept_promises_are_held() -> None:
    assert held([KEPT], [WHOLE])
    assert table([KEPT], [WHOLE]).splitlines()[2].endswith("yes")


@pytest.mark.parametrize("change", [{"lost": 1}, {"next_step": 3.1}, {"next_step": None, "lost": None}])
def test_one_broken_promise_is_enough(change: dict[str, object]) -> None:
    broken = replace(KEPT, **change)
    assert not held([KEPT, broken], [WHOLE])
    assert table([KEPT, broken], [WHOLE]).splitlines()[3].endswith("NO")


def test_a_failed_check_is_enough() -> None:
    assert not held([KEPT], [replace(WHOLE, held=False)])
