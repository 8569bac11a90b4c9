"""Ports that are chosen before a process listens on them."""

from __future__ import annotations

import itertools
import random

import pytest

from holdfast_testbed.ports import free_port


def test_a_port_that_is_drawn_again_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens on it yet, so it looks free."""
    drawn = itertools.chain([20_000, 20_000], itertools.count(20_001))
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
    assert free_port() != free_port()
