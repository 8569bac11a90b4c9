"""Writes: what goes over the wire, and what is left of a pass that was refused or cut."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim import Sim

from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.decision.plan import CreatePod, DeletePod, Event, Publish, RestorePod
from holdfast_operator.errors import ClusterError, ConflictError, NotFoundError, RejectedError
from holdfast_operator.reconcile.act import Actor, job_event, status_patch, without_nulls
from holdfast_operator.reconcile.job_memories import JobMemory

VALUES = st.recursive(
    st.none() | st.integers(0, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


def merged(before: Any, patch: Any) -> Any:
    """RFC 7396, as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(before=OBJECTS, after=OBJECTS)
def test_patch_leads_to_the_desired_status(before: Any, after: Any) -> None:
    """It is empty only if nothing changes."""
    patch = status_patch(before, after)
    result = merged(before, patch)
    assert status_patch(result, after) == {}
    assert bool(patch) == (without_nulls(result) != without_nulls(before))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(before=OBJECTS, after=OBJECTS)
def test_what_another_version_wrote_beside_it_stays(before: Any, after: Any) -> None:
    result = merged(before, status_patch(before, after))
    assert {key: result[key] for key in before if key not in after} == {
        key: value for key, value in before.items() if key not in after
    }


class Api:
    """Records calls; refuses what it is told to."""

    def __init__(self, **refusals: Exception) -> None:
        self.calls: list[tuple[str, str]] = []
        self._refusals = refusals

    def create_pod(self, manifest: Any) -> Any:
        return self._call("create_pod", manifest["metadata"]["name"]) or {"metadata": {"uid": "u"}}

    def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        self._call("delete_pod", name)

    def restore_pod(self, namespace: str, name: str, uid: str, marks: Any) -> None:
        self._call("restore_pod", name)

    def _call(self, method: str, name: str) -> None:
        self.calls.append((method, name))
        if method in self._refusals:
            raise self._refusals[method]


def actor(api: Any) -> Actor:
    return Actor(cluster=api, hub=AgentHub(lambda _token: None, lambda _uid: None), identity="test")


def creations(*names: str) -> tuple[CreatePod, ...]:
    return tuple(CreatePod(name=name, manifest={"metadata": {"name": name}}) for name in names)


def plan_with(trained: Sim, *actions: Any) -> Any:
    return replace(trained.plan(), actions=actions)


def test_refused_creation_stops_only_similar_ones(trained: Sim) -> None:
    api = Api(create_pod=RejectedError("pod a", "QuotaExceeded", "exceeded quota: pods"))
    plan = plan_with(trained, *creations("a", "b"), DeletePod(name="c", uid="u", why="test"))
    memory, failure = actor(api).act(trained.observe().job, plan, JobMemory())
    assert api.calls == [("create_pod", "a"), ("delete_pod", "c")]
    assert failure is None, "an answer, which the next pass would get as well"
    assert memory.refusal is not None
    assert memory.refusal.reason == "QuotaExceeded"
    assert "exceeded quota" in memory.refusal.message


def test_failed_relabelling_does_not_stop_a_creation(trained: Sim) -> None:
    api = Api(restore_pod=RejectedError("PATCH …/pods/a", "Rejected", "labels are protected"))
    restored = [RestorePod(name=name, uid="u", marks={"labels": {}}) for name in ("a", "b")]
    memory, failure = actor(api).act(
        trained.observe().job, plan_with(trained, *restored, *creations("c")), JobMemory()
    )
    assert api.calls == [("restore_pod", "a"), ("restore_pod", "b"), ("create_pod", "c")]
    assert (memory.refusal, failure) == (None, None)


def test_a_creation_that_succeeds_ends_the_refusal(trained: Sim) -> None:
    api = Api(create_pod=RejectedError("pod a", "QuotaExceeded", "exceeded quota: pods"))
    job = trained.observe().job
    memory, _failure = actor(api).act(job, plan_with(trained, *creations("a")), JobMemory())
    memory, _failure = actor(api).act(job, plan_with(trained), memory)
    assert memory.refusal is not None
    memory, _failure = actor(Api()).act(job, plan_with(trained, *creations("a")), memory)
    assert memory.refusal is None


def test_what_changed_meanwhile_is_left_to_the_next_pass(trained: Sim) -> None:
    for error in (ConflictError("changed"), NotFoundError("gone")):
        api = Api(delete_pod=error)
        plan = plan_with(trained, *[DeletePod(name=name, uid="u", why="test") for name in ("a", "b")])
        actor(api).act(trained.observe().job, plan, JobMemory())
        assert api.calls == [("delete_pod", "a"), ("delete_pod", "b")]


def test_a_publication_is_remembered_by_its_revision(trained: Sim) -> None:
    plan = plan_with(trained, Publish(revision=9, document={"revision": 9}))
    memory, _failure = actor(Api()).act(trained.observe().job, plan, JobMemory())
    assert memory.published == 9


@pytest.mark.parametrize("answer", ["was answered with 500: failed calling webhook", "failed: ReadTimeout"])
def test_launchers_get_the_membership_if_no_pod_is_created(trained: Sim, answer: str) -> None:
    """A webhook for pods that is away answers each creation with a 500, maybe as it sat on the lost node."""
    api = Api(create_pod=ClusterError(f"POST …/pods {answer}"))
    plan = plan_with(trained, *creations("a", "b"), Publish(revision=9, document={"revision": 9}))
    memory, failure = actor(api).act(trained.observe().job, plan, JobMemory())
    assert memory.published == 9
    assert api.calls == [("create_pod", "a")]
    assert failure is not None, "the pass is tried again"
    assert memory.refusal is not None, "and the job says why meanwhile"
    assert (memory.refusal.reason, answer in memory.refusal.message) == ("CreationFailed", True)


def test_what_the_api_server_does_not_answer_stops_its_like_only(trained: Sim) -> None:
    api = Api(delete_pod=ClusterError("DELETE …/pods/a was answered with 503"))
    deletions = [DeletePod(name=name, uid="u", why="test") for name in ("a", "b")]
    memory, failure = actor(api).act(
        trained.observe().job, plan_with(trained, *deletions, *creations("c")), JobMemory()
    )
    assert api.calls == [("delete_pod", "a"), ("create_pod", "c")]
    assert "503" in str(failure)
    assert memory.refusal is None


def test_a_long_note_is_cut_by_bytes_and_keeps_its_end(trained: Sim) -> None:
    event = Event(reason="Exception", message="é" * 2000 + "x\nValueError: the last line", warning=True)
    note = job_event(trained.observe().job, event, trained.now, 0, "operator-1")["note"]
    assert 1020 < len(note.encode()) <= 1024
    assert note.startswith("…é")
    assert note.endswith("ValueError: the last line")


def test_events_carry_the_same_words_and_fit(trained: Sim) -> None:
    job = trained.observe().job
    event = Event(reason="RunningWithFewerWorkers", message="m" * 5000, warning=True)
    manifest = job_event(job, event, trained.now, 0, "operator-1")
    assert manifest["reason"] == "RunningWithFewerWorkers"
    assert len(manifest["note"].encode()) == 1024
    assert manifest["type"] == "Warning"
    assert manifest["regarding"]["uid"] == job.uid
    assert manifest["metadata"]["name"] != job_event(job, event, trained.now, 1, "x")["metadata"]["name"]


def test_events_above_the_limit_are_counted(trained: Sim) -> None:
    left_out: list[int] = []
    hub = AgentHub(lambda _token: None, lambda _uid: None)
    writer = Actor(cluster=cast(Any, Api()), hub=hub, identity="test", left_out=left_out.append)
    job, events = trained.observe().job, tuple(Event(reason="R", message=str(n)) for n in range(5_000))
    told = writer.granted(job, events, trained.now)
    assert [event.message for event in told[:-1]] == [str(n) for n in range(199)]
    assert told[-1].message == "199 (4800 more events suppressed)"
    assert writer.granted(job, events[:1], trained.now) == ()
    assert left_out == [4800, 1]
    later = trained.now + timedelta(seconds=1)
    assert writer.granted(job, events[:1], later) == events[:1]
    assert len(writer.granted(replace(job, uid="another"), events[:200], later)) == 200
