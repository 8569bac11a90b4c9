"""The tiers of the final checkpoint: what fits into 60 % of the notice, and always at least one tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import UsageError
from holdfast.launcher.drain.last_checkpoint_plan import SHARE, Plan, Speed, TierEstimate, plan
from holdfast.launcher.membership.document import Member
from holdfast.launcher.status.status_document import Identity
from holdfast.launcher.tiers.memory_tier import MemoryHost
from holdfast.launcher.tiers.options import TierOptions

GB = 10**9


def tier(
    name: str, seconds: float | None, source: str = "", *, node: str | None = None, due: bool = False
) -> TierEstimate:
    speed = None if seconds is None else GB / seconds
    return TierEstimate(name=name, nbytes=GB, bytes_per_second=speed, source=source, node=node, due=due)


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
def test_planned_work_ends_within_its_share_of_the_notice(tiers: list[TierEstimate], notice: float) -> None:
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
def test_the_last_commit_is_always_tried_somewhere(tiers: list[TierEstimate], notice: float) -> None:
    assert plan(tiers, notice).tiers


@given(tiers=tiers, notice=st.floats(0, 1e4), more=st.floats(0, 1e4))
def test_a_longer_notice_takes_no_tier_away(tiers: list[TierEstimate], notice: float, more: float) -> None:
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
def test_the_choice(tiers: list[TierEstimate], notice: float, chosen: tuple[str, ...], certain: bool) -> None:
    made = plan(tiers, notice)
    assert (made.tiers, made.certain) == (chosen, certain)


def test_the_reason_has_the_figures() -> None:
    made = plan([tier("shared", 4.1), tier("object", None, "shared")], 30.0)
    assert made == Plan(
        tiers=("shared", "object"),
        reason="18.0 s of the notice of 30.0 s are usable (shared: done in 4.1 s; object: not measured)",
        certain=True,
    )


def test_full_save_is_predicted_at_the_median_of_the_last_five() -> None:
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
        TierEstimate(name="shared", nbytes=1, bytes_per_second=0.0)


# Memory and peers

OWN, OTHER = "node-a", "node-b"


@st.composite
def worlds(draw: st.DrawFn, *, due: bool = True) -> list[TierEstimate]:
    """Draw the tiers of a job in the order in which a final checkpoint fills them."""
    took = st.none() | st.floats(0.01, 100.0)
    memory = tier("memory", draw(took), node=OWN, due=due and draw(st.booleans()))
    peer = tier(
        "peer", draw(took), "memory", node=draw(st.sampled_from([OTHER, OWN])), due=memory.due and draw(st.booleans())
    )
    shared, copies = tier("shared", draw(took)), tier("object", draw(took), "shared")
    near = draw(st.sampled_from([[], [memory], [memory, peer]]))
    return [*near, shared, *draw(st.sampled_from([[], [copies]]))]


GOING = st.sampled_from([frozenset[str](), frozenset({OWN}), frozenset({OTHER}), frozenset({OWN, OTHER})])
SOON = st.floats(0, 300)


@given(tiers=worlds(due=False), notice=SOON, wait=st.floats(0, 10), leaving=GOING)
def test_planned_work_after_other_saves_ends_within_the_share(
    tiers: list[TierEstimate], notice: float, wait: float, leaving: frozenset[str]
) -> None:
    """The time includes everything that is written earlier."""
    made = plan(tiers, notice, wait=wait, leaving=leaving)
    at = wait
    for one in (one for one in tiers if one.name in made.tiers):
        if one.seconds is None:
            break  # nothing unmeasured follows it in a certain plan
        at += one.seconds
        assert not made.certain or at <= SHARE * notice * (1 + 1e-9)


@given(tiers=worlds(), notice=SOON, wait=st.floats(0, 10), leaving=GOING)
def test_plan_is_certain_only_with_a_tier_in_time_that_survives(
    tiers: list[TierEstimate], notice: float, wait: float, leaving: frozenset[str]
) -> None:
    made = plan(tiers, notice, wait=wait, leaving=leaving)
    at: float | None = wait
    counted = []
    for one in (one for one in tiers if one.name in made.tiers):
        at = None if at is None or one.seconds is None else at + one.seconds
        counted += [one.name] if at is not None and at <= SHARE * notice and one.node not in leaving else []
    assert made.certain == bool(counted)


@given(tiers=worlds(), notice=SOON, wait=st.floats(0, 10), leaving=GOING)
def test_tier_lost_with_the_node_is_used_only_if_due_or_a_source(
    tiers: list[TierEstimate], notice: float, wait: float, leaving: frozenset[str]
) -> None:
    made = plan(tiers, notice, wait=wait, leaving=leaving)
    sources = {one.source for one in tiers if one.name in made.tiers}
    for one in tiers:
        if one.name in made.tiers and one.node in leaving:
            assert one.due or one.name in sources
    assert {one.name for one in tiers if one.due} <= set(made.tiers)


@given(tiers=worlds(), notice=SOON, more=SOON, wait=st.floats(0, 10), leaving=GOING)
def test_longer_notice_removes_no_tier_from_a_certain_plan(
    tiers: list[TierEstimate], notice: float, more: float, wait: float, leaving: frozenset[str]
) -> None:
    """The memory and peer tiers are included."""
    short = plan(tiers, notice, wait=wait, leaving=leaving)
    if short.certain:
        assert set(short.tiers) <= set(plan(tiers, notice + more, wait=wait, leaving=leaving).tiers)


@given(tiers=worlds(due=False), notice=SOON, wait=st.floats(0, 10))
def test_memory_and_copies_that_all_go_change_nothing(tiers: list[TierEstimate], notice: float, wait: float) -> None:
    durable = [one for one in tiers if one.node is None]
    made, without = plan(tiers, notice, wait=wait, leaving={OWN, OTHER}), plan(durable, notice, wait=wait)
    assert (made.tiers, made.certain) == (without.tiers, without.certain)


def near(memory: float | None, peer: float | None, *, there: str = OTHER, due: bool = False) -> list[TierEstimate]:
    return [
        tier("memory", memory, node=OWN, due=due),
        tier("peer", peer, "memory", node=there, due=due),
    ]


@pytest.mark.parametrize(
    ("tiers", "chosen", "certain"),
    [
        pytest.param([*near(1.0, 2.0), tier("shared", 4.0)], ("memory", "peer", "shared"), True, id="all fit"),
        pytest.param([*near(1.0, 2.0), tier("shared", 40.0)], ("memory", "peer"), True, id="only a copy fits"),
        pytest.param([*near(8.0, 10.0), tier("shared", 4.0)], ("shared",), True, id="a copy would make it late"),
        pytest.param([*near(8.0, 10.0), tier("shared", 40.0)], ("memory", "peer"), True, id="just in time"),
        pytest.param(
            [*near(8.0, 10.1), tier("shared", 40.0)], ("memory", "peer"), False, id="late, but the quickest"
        ),
        pytest.param([tier("memory", 0.1, node=OWN), tier("shared", 40.0)], ("shared",), False, id="memory alone"),
        pytest.param(
            [*near(0.1, 0.2, there=OWN), tier("shared", 40.0)], ("shared",), False, id="the copy's node goes too"
        ),
        pytest.param([*near(1.0, None), tier("shared", 4.0)], ("shared",), True, id="unknown delays none that fits"),
        pytest.param([*near(1.0, None), tier("shared", 40.0)], ("memory", "peer"), False, id="unknown is tried"),
        pytest.param(
            [*near(1.0, 2.0, due=True), tier("shared", 15.1)], ("memory", "peer"), True, id="what is due comes first"
        ),
        pytest.param(
            [tier("memory", 8.0, node=OWN, due=True), tier("shared", 10.0)],
            ("memory", "shared"),
            True,
            id="due, and worth nothing",
        ),
    ],
)
def test_choice_with_memory_and_peers_at_a_30_second_notice(
    tiers: list[TierEstimate], chosen: tuple[str, ...], certain: bool
) -> None:
    made = plan(tiers, 30.0, leaving={OWN})
    assert (made.tiers, made.certain) == (chosen, certain)


def test_reason_names_tiers_lost_with_the_node_and_step_time() -> None:
    made = plan([*near(1.0, 2.0), tier("shared", 40.0)], 30.0, wait=0.5, leaving={OWN})
    assert made.reason == (
        "18.0 s of the notice of 30.0 s are usable, including 0.5 s for the step in progress "
        "(memory: done in 1.5 s, and lost with node node-a; peer: done in 3.5 s; shared: done in 43.5 s)"
    )


@pytest.mark.parametrize(
    ("intervals", "due"), [((1, 1), (True, True)), ((1, 4), (True, False)), ((4, 4), (False,) * 2)]
)
def test_a_launcher_knows_where_its_copies_go_and_what_they_take(
    tmp_path: Path, intervals: tuple[int, int], due: tuple[bool, bool]
) -> None:
    options = TierOptions(root=tmp_path, interval=intervals[0], peer_interval=intervals[1])
    host = MemoryHost(options, identity=Identity(pod_uid="u1", pod="one", node=OWN), host="127.0.0.1")
    speeds = {name: Speed() for name in ("memory", "peer")}
    speeds["memory"].took(GB, 1.0)
    speeds["peer"].took(GB, 2.0)
    world = [Member(index=0, pod_uid="u1", node=OWN), Member(index=1, pod_uid="u2", node=OTHER)]
    memory, peer = host.estimates(speeds, world)
    assert (memory.seconds, memory.node, memory.due) == (1.0, OWN, due[0])
    assert (peer.seconds, peer.node, peer.due, peer.source) == (2.0, OTHER, due[1], "memory")
    assert [one.name for one in host.estimates(speeds, world[:1])] == ["memory"], "nobody is on another node"


def test_a_launcher_that_is_asked_for_no_copies_plans_none(tmp_path: Path) -> None:
    options = TierOptions(root=tmp_path)
    host = MemoryHost(options, identity=Identity(pod_uid="u1", pod="one", node=OWN), host="127.0.0.1")
    world = [Member(index=0, pod_uid="u1", node=OWN), Member(index=1, pod_uid="u2", node=OTHER)]
    assert [one.name for one in host.estimates({"memory": Speed()}, world)] == ["memory"]
