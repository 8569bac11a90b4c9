"""Who is taken for cut off: by the silence of a worker, and what those say who are heard."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.status import Member, Membership, Phase, Worker
from holdfast_operator.api.timings import DEFAULT_TIMINGS
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.decision.workers.network_partition import cut_off
from holdfast_operator.views import Report, World

Make = Callable[..., PlanDraft]
ATTEMPT_ID = AttemptId(generation=1, attempt=1)
SECOND = timedelta(seconds=1)


@pytest.fixture
def make_draft(observed: Observed) -> Make:
    """Workers of one generation: for each how many seconds ago it was heard (None: never), and whom it misses."""

    def make(
        ago: list[float | None],
        missed: dict[int, Collection[int]],
        *,
        began: float = 3600,
        on_failure: str = "Replace",
        world: Collection[int] = (),
        outside: Collection[int] = (),
        launched: bool = True,
    ) -> PlanDraft:
        uids = [f"u{number}" for number in range(len(ago))]
        now = observed.started_at + timedelta(seconds=began)
        told = World(attempt_id=ATTEMPT_ID, publication="p", members=tuple(uids[n] for n in world), coordinator="u0")
        reports = tuple(
            Report(
                pod_uid=uids[number],
                received_at=now - seconds * SECOND,
                has_launcher=True,
                ready=True,
                world=told if number in world else None,
                lost_members=tuple(uids[other] for other in missed.get(number, ())),
            )
            for number, seconds in enumerate(ago)
            if seconds is not None
        )
        workers = tuple(
            Worker(incarnation=n, batch=0, pod_uid=uid, node="n", ready_at=now - 2 * DEFAULT_TIMINGS.cut_off)
            for n, uid in enumerate(uids)
        )
        members = tuple(
            Member(index=n, pod=uid, pod_uid=uid, ip="", store=1, control=2, node="n")
            for n, uid in enumerate(uids)
            if n not in outside
        )
        membership = Membership(generation=1, members=members)
        status = replace(observed.status, workers=workers, incarnations=len(uids), membership=membership)
        rendezvous = "Holdfast" if launched else "C10d"
        spec = replace(observed.job.spec, on_failure=on_failure, min_replicas=1, rendezvous=rendezvous)
        seen = replace(observed, status=status, reports=reports, job=replace(observed.job, spec=spec))
        return PlanDraft(seen=seen, now=now, status=status)

    return make


def test_missed_by_its_peers_and_silent_for_long(make_draft: Make) -> None:
    assert cut_off(make_draft([60, 1, 1], {1: [0], 2: [0]})) == {"u0"}


@pytest.mark.parametrize(
    ("ago", "missed", "more"),
    [
        pytest.param([59, 1, 1], {1: [0], 2: [0]}, {}, id="it may come back"),
        pytest.param([90, 1, 1], {}, {}, id="its peers train with it: its sidecar alone fails"),
        pytest.param([90, 1, 1, 1], {1: [0], 2: [0]}, {"world": [1, 2, 3, 0]}, id="a world that runs has it"),
        pytest.param([90, 1, 1], {1: [0]}, {}, id="no more than half of those who are heard miss it"),
        pytest.param([90, 30, 30], {1: [0], 2: [0]}, {}, id="what its peers said is old"),
        pytest.param([90, 90, 90], {0: [1, 2]}, {}, id="nobody is heard: it is the operator that is cut off"),
        pytest.param([90, 1, 1], {1: [0], 2: [0]}, {"began": 59}, id="the operator has listened for less"),
        pytest.param([None, 1, 1], {1: [0], 2: [0]}, {"began": 59}, id="it was never heard, for as long"),
        pytest.param([90], {}, {}, id="it is alone, and trains"),
        pytest.param([1, 1], {0: [1], 1: [0]}, {}, id="both are heard, and miss each other"),
        pytest.param([90, 90, 1], {2: [0, 1]}, {"on_failure": "Shrink"}, id="a majority may train on unheard"),
        pytest.param([90, 1, 1], {1: [0], 2: [0]}, {"launched": False}, id="there is no launcher that could tell"),
    ],
)
def test_is_taken_for_cut_off_in_no_other_case(
    make_draft: Make, ago: list[float | None], missed: dict[int, list[int]], more: dict[str, Any]
) -> None:
    assert not cut_off(make_draft(ago, missed, **more))


def test_unseen_worker_is_judged_by_its_peers(make_draft: Make) -> None:
    """The operator must have received reports for a while."""
    assert cut_off(make_draft([None, 1, 1], {1: [0], 2: [0]}, began=60)) == {"u0"}


def test_half_of_a_generation_makes_no_world_and_is_cut_off(make_draft: Make) -> None:
    missed = {2: [0, 1], 3: [0, 1]}
    assert cut_off(make_draft([90, 90, 1, 1], missed, on_failure="Shrink")) == {"u0", "u1"}


def test_worker_outside_of_the_generation_is_unreachable(
    make_draft: Make,
) -> None:
    """No launcher can miss it; other workers report."""
    assert cut_off(make_draft([90, 1], {}, outside=[0], world=[1])) == {"u0"}
    assert not cut_off(make_draft([90, 1], {}, outside=[0], world=[0, 1])), "an older world trains with it"


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), on_failure=st.sampled_from(["Shrink", "Replace"]))
def test_reporting_or_training_worker_is_not_unreachable(
    make_draft: Make, data: st.DataObject, on_failure: str
) -> None:
    """A worker that may belong to a world without reports is not either."""
    count = data.draw(st.integers(1, 6))
    numbers = st.sets(st.integers(0, count - 1))
    ago = data.draw(st.lists(st.sampled_from([1, 30, 90, None]), min_size=count, max_size=count))
    missed = {number: data.draw(numbers) for number in range(count)}
    world, outside = data.draw(numbers), data.draw(numbers)
    draft = make_draft(ago, missed, on_failure=on_failure, world=world, outside=outside)
    found = {int(uid[1:]) for uid in cut_off(draft)}
    members, heard = set(range(count)) - outside, {n for n in range(count) if ago[n] == 1}
    assert not found & {n for n in range(count) if ago[n] in (1, 30)}
    assert not found or heard & members
    assert not heard & world or not found & world
    if found and on_failure == "Shrink":
        assert 2 * len(members - heard) <= len(members)


def test_only_the_wanted_are_judged(make_draft: Make) -> None:
    draft = make_draft([90, 1, 1], {1: [0], 2: [0]})
    leaving = replace(draft.status.workers[0], phase=Phase.LEAVING)
    assert not cut_off(draft.with_worker(leaving))
