"""The environment of a rank process in addition to the variables of torchrun."""

from __future__ import annotations

import pytest

from holdfast.launcher.ranks.environ import tunables

OURS = "glibc.cpu.x86_non_temporal_threshold=0x400000"
THEIRS = "glibc.malloc.arena_max=2"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        pytest.param(None, OURS, id="nothing is said"),
        pytest.param("", OURS, id="nothing is said, in so many words"),
        pytest.param(THEIRS, f"{THEIRS}:{OURS}", id="something else is said"),
    ],
)
def test_c_library_gets_the_size_at_which_copies_skip_the_cache(said: str | None, found: str) -> None:
    base = {} if said is None else {"GLIBC_TUNABLES": said}
    assert tunables(base) == {"GLIBC_TUNABLES": found}


def test_what_the_user_says_of_copies_past_the_cache_goes() -> None:
    assert tunables({"GLIBC_TUNABLES": f"{THEIRS}:glibc.cpu.x86_non_temporal_threshold=0x10000"}) == {}
