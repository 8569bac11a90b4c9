"""The mark of remediation on a node is read as it was written."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sick_nodes import NOW

from holdfast_operator.api.node_mark import Mark, Mode, mark_of

MODES = st.sampled_from(list(Mode))
MOMENTS = st.integers(0, 10**15).map(lambda passed: NOW + timedelta(microseconds=passed))
TIMES = st.none() | MOMENTS


@given(
    st.builds(
        Mark,
        mode=MODES,
        message=st.text(max_size=50),
        since=MOMENTS,
        alerts=st.lists(st.text(max_size=16), max_size=4).map(tuple),
        clear_since=TIMES,
        draining_since=TIMES,
        terminating_since=TIMES,
        overruled=st.booleans(),
        until_reboot=st.booleans(),
        boot_id=st.text(max_size=16),
        gpus=st.integers(0, 16),
    )
)
def test_a_mark_is_read_as_it_was_written(mark: Mark) -> None:
    node = {"metadata": {"annotations": {"holdfast.dev/remediation": mark.to_json()}}}
    assert mark_of(node) == mark


@pytest.mark.parametrize("text", ["", "yes", "[]", '{"version": 2}', '{"version": 1, "mode": "Eat"}', "{" * 9000])
def test_a_mark_that_cannot_be_read_is_none(text: str) -> None:
    assert mark_of({"metadata": {"annotations": {"holdfast.dev/remediation": text}}}) is None
