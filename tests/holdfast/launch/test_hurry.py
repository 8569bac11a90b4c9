"""Where a last commit goes: what fits into 60 % of the notice, and never to nowhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.launch.hurry import SHARE, Plan, Speed, Tier, plan

GB = 10**9


def tier(name: str, seconds: float | None, source: str = "") -> Tier:
    return Tier(name=name, nbytes=GB, bytes_per_second=None if seconds is None else GB / seconds, source=source)


tiers = st.lists(
    st.tuples(st.sampled_from(["memory", "local", "peer", "shared", "object"]), st.none() | st.floats(0.01, 1e4)),
    min_size=1,
    unique_by=lambda one: one[0],
).map(
    lambda told: [
        tier(name, seconds, told[0][0] if name == "object" and told[0][0] != "object" else "")
        for name, seconds in told
    ]
)


@given(tiers=tiers, notice=st.floats(0, 1e4))
def test_what_is_counted_on_is_done_within_the_share_of_the_notice(tiers: list[Tier], notice: float) -> None:
    made = plan(tiers, notice)
    seconds = {one.name: one.seconds for one in tiers}
    sources = {one.name: one.source for one in tiers}
    if made.certain:
        for name in made.tiers:
            alone, before = seconds[name], seconds.get(sources[name], 0.0)
            assert alone is None or before is None or alone + before <= SHARE * notice
    for name in made.tiers:
        assert sources[name] in ("", *made.tiers), "nothing is copied from where it was not put"


@given(tiers=tiers, notice=st.floats(-10, 1e4))
def test_the_last_commit_is_always_tried_somewhere(tiers: list[Tier], notice: float) -> None:
    assert plan(tiers, notice).tiers


@given(tiers=tiers, notice=st.floats(0, 1e4), more=st.floats(0, 1e4))
def test_a_longer_notice_takes_no_tier_away(tiers: list[Tier], notice: float, more: float) -> None:
    short, long = plan(tiers, notice), plan(tiers, notice + more)
    if short.certain:
        assert set(short.tiers) <= set(long.tiers)


@pytest.mark.parametrize(
    ("tiers", "notice", "chosen", "certain"),
    [
        ([tier("shared", 10.0)], 30.0, ("shared",), True),
        ([tier("shared", 10.0), tier("object", 8.0, "shared")], 30.0, ("shared", "object"), True),
        ([tier("shared", 10.0), tier("object", 8.1, "shared")], 30.0, ("shared",), True),
        ([tier("shared", 19.0), tier("object", 1.0, "shared")], 30.0, ("shared",), False),
        ([tier("peer", 2.0), tier("shared", 19.0)], 30.0, ("peer",), True),
        ([tier("peer", 40.0), tier("shared", 20.0)], 30.0, ("shared",), False),
        ([tier("shared", None)], 30.0, ("shared",), False),
        ([tier("shared", 1.0), tier("object", None, "shared")], 30.0, ("shared", "object"), True),
        ([tier("shared", 1.0)], 0.0, ("shared",), False),
        ([], 30.0, (), False),
    ],
)
def test_the_choice(tiers: list[Tier], notice: float, chosen: tuple[str, ...], certain: bool) -> None:
    made = plan(tiers, notice)
    assert (made.tiers, made.certain) == (chosen, certain)


def test_the_reason_has_the_figures() -> None:
    made = plan([tier("shared", 4.1), tier("object", None, "shared")], 30.0)
    assert made == Plan(
        tiers=("shared", "object"),
        reason="of 30.0 s, 18.0 s are counted on (shared: done in 4.1 s; object: not measured)",
        certain=True,
    )


def test_a_full_commit_is_predicted_at_the_median_speed_of_the_last_five() -> None:
    speed = Speed()
    assert speed.tier("shared").bytes_per_second is None
    for nbytes, seconds in ((9 * GB, 1.0), (GB, 1.0), (GB, 1.0), (GB, 50.0), (1000, 0.000001), (GB, 1.0)):
        speed.took(nbytes, seconds)
    assert (speed.tier("shared").nbytes, speed.tier("shared").bytes_per_second) == (GB, GB)
    speed.took(0, 1.0)
    speed.took(GB, 0.0)
    assert len(speed.taken) == 5


def test_a_speed_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="tier shared"):
        Tier(name="shared", nbytes=1, bytes_per_second=0.0)
