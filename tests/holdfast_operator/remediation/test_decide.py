"""What is done about sick nodes, and above all what is not."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sick_nodes import MINUTE, NOW, alert, machine, marked, only, plan, pod, reasons, rules

from holdfast_operator.api.node_mark import Mode
from holdfast_operator.remediation.decide import remedy
from holdfast_operator.remediation.fleet import FleetSnapshot, HistoryEntry, Node, StayReason
from holdfast_operator.remediation.plan import Evict, Release, SetMark, Terminate
from holdfast_operator.remediation.settings import NodeLimit


def test_an_alert_marks_and_cordons_its_node_in_one_write() -> None:
    made = plan(machine(), machine("n1"), alerts=[alert()])
    (action,) = made.actions
    assert isinstance(action, SetMark)
    assert (action.machine.name, action.cordon, action.mark.mode) == ("n0", True, Mode.DRAIN)
    assert action.mark.alerts == ("Hot-n0",)
    assert action.mark.draining_since == NOW
    assert "alert Hot" in only(made).message


def test_two_alerts_for_one_node_are_one_action_of_stronger_mode() -> None:
    made = plan(machine(), alerts=[alert(mode=Mode.CORDON, name="Warm"), alert(mode=Mode.DRAIN)])
    (action,) = made.actions
    assert isinstance(action, SetMark)
    assert action.mark.mode is Mode.DRAIN
    assert set(action.mark.alerts) == {"Hot-n0", "Warm-n0"}
    assert "Hot" in action.mark.message
    assert "Warm" in action.mark.message


def test_the_installations_mode_bounds_what_an_alert_asks_for() -> None:
    (action,) = plan(machine(), alerts=[alert(mode=Mode.REPLACE)], mode=Mode.CORDON).actions
    assert isinstance(action, SetMark)
    assert action.mark.mode is Mode.CORDON
    assert action.mark.draining_since is None


@pytest.mark.parametrize(
    ("node", "change", "reason"),
    [
        (machine(), {"mode": Mode.OBSERVE}, "NodeAlerted"),
        (machine(), {"dry_run": True}, "DryRun"),
        (machine(labels={"node-role.kubernetes.io/control-plane": ""}), {}, "ControlPlane"),
        (machine(), {"node_selector": {"pool": "gpu"}}, "NotSelected"),
        (machine(unschedulable=True), {}, "CordonedByOthers"),
        (machine(marked=True), {}, "MarkUnreadable"),
        (machine(), {"max_unavailable": NodeLimit(number=0)}, "BreakerOpen"),
        (machine(), {"max_per_hour": 0}, "RateLimited"),
    ],
)
def test_a_node_is_left_alone_and_the_reason_is_told(node: Node, change: dict[str, Any], reason: str) -> None:
    made = plan(node, alerts=[alert()], **change)
    assert made.actions == ()
    assert only(made).reason == reason
    assert "Hot" in only(made).message


def test_a_node_is_left_alone_for_a_while_after_it_was_released() -> None:
    entry = HistoryEntry(node="n0", started=NOW - 90 * MINUTE, ended=NOW - 50 * MINUTE)
    made = plan(machine(), alerts=[alert()], history=[entry])
    assert (made.actions, reasons(made)) == ((), ["CoolingDown"])
    assert made.requeue_after == 600
    assert plan(machine(), alerts=[alert()], history=[entry], now=NOW + 11 * MINUTE).actions


def test_the_rate_counts_nodes_that_were_removed_while_marked() -> None:
    """An autoscaler removes what is drained and empty: each node's name is new, and no mark is left to count."""
    history: tuple[HistoryEntry, ...] = ()
    begun = 0
    for minute in range(12):
        made = plan(
            machine(f"n{minute}"),
            alerts=[alert(f"n{minute}")],
            now=NOW + minute * MINUTE,
            history=history,
            max_per_hour=2,
        )
        begun += len(made.actions)
        history = made.history
    assert begun == 2


def test_a_mark_whose_write_failed_is_retried_and_counted_once() -> None:
    failed = plan(machine(), alerts=[alert()], max_per_hour=1)
    again = plan(machine(), alerts=[alert()], now=NOW + MINUTE, history=failed.history, max_per_hour=1)
    assert [type(action) for action in again.actions] == [SetMark]
    assert [entry.started for entry in again.history] == [NOW + MINUTE]
    assert reasons(plan(machine("n1"), alerts=[alert("n1")], history=again.history, max_per_hour=1)) == [
        "RateLimited"
    ]


def test_a_marked_node_counts_once_and_cools_down_from_release() -> None:
    (first,) = plan(machine(), alerts=[alert()]).history
    node = marked(since=first.started)
    assert (
        reasons(plan(node, machine("n1"), alerts=[alert("n1")], history=[first], max_per_hour=2))[-1]
        == "NodeCordoned"
    )
    back = replace(machine(), uid="another machine of that name")
    assert plan(back, alerts=[alert()], now=NOW + MINUTE, history=[first]).actions


def test_nodes_unavailable_for_any_reason_count_for_the_breaker() -> None:
    others = [machine("n1", ready=False), machine("n2", unschedulable=True), *map(machine, ("n3", "n4"))]
    open_at_three = NodeLimit(number=3)
    assert plan(machine(), *others, alerts=[alert()], max_unavailable=open_at_three).actions
    again = plan(machine(), *others, alerts=[alert()], max_unavailable=NodeLimit(number=2))
    assert reasons(again) == ["BreakerOpen"]


def test_a_sick_node_does_not_count_against_its_own_remedy() -> None:
    assert plan(machine(ready=False), machine("n1"), alerts=[alert()], max_unavailable=NodeLimit(number=1)).actions


def test_a_percentage_is_of_the_eligible_nodes_and_rounded_up() -> None:
    nodes = [machine(f"n{number}", labels={"pool": "gpu"}) for number in range(11)]
    rest = [machine(f"cpu{number}") for number in range(100)]
    storm = [alert(f"n{number}") for number in range(11)]
    ten_percent = {"max_unavailable": NodeLimit(number=10, percent=True), "node_selector": {"pool": "gpu"}}
    made = plan(*nodes, *rest, alerts=storm, **ten_percent)
    assert len(made.actions) == 2
    assert reasons(made).count("BreakerOpen") == 9


def test_the_rate_counts_present_and_past_marks_once_per_node() -> None:
    mark = marked("n1").mark
    assert mark is not None
    gone = HistoryEntry(node="old", started=NOW - 30 * MINUTE, ended=NOW - 5 * MINUTE)
    same = HistoryEntry(node="n1", started=mark.since, ended=NOW)
    nodes = (machine(), marked("n1"), machine("n2"))
    assert reasons(plan(*nodes, alerts=[alert()], history=[gone, same], max_per_hour=2))[-1] == "RateLimited"
    assert any(
        isinstance(action, SetMark) and action.cordon
        for action in plan(*nodes, alerts=[alert()], history=[gone, same], max_per_hour=3).actions
    )


def test_the_oldest_alert_is_served_first() -> None:
    late, early = alert("n0"), replace(alert("n1"), started=NOW - MINUTE)
    (action,) = plan(machine(), machine("n1"), alerts=[late, early], max_per_hour=1).actions
    assert action.machine.name == "n1"


def test_a_drain_evicts_each_pod_once_and_waits_for_leaving_pods() -> None:
    pods = [pod("web"), pod("going", deleted_at=NOW), pod("worker", patience=2 * MINUTE)]
    made = plan(marked(pods=pods), alerts=[alert()])
    assert [action.pod.name for action in made.actions if isinstance(action, Evict)] == ["web"]
    assert reasons(made) == ["NodeDraining"]
    later = plan(marked(pods=pods[2:]), alerts=[alert()], now=NOW + 2 * MINUTE)
    assert [action.pod.name for action in later.actions if isinstance(action, Evict)] == ["worker"]


def test_past_the_deadline_it_is_told_and_nothing_is_forced() -> None:
    made = plan(marked(pods=[pod("held")]), alerts=[alert()], now=NOW + timedelta(hours=1))
    assert reasons(made) == ["DrainIncomplete"]
    assert "ml/held" in only(made).message
    assert [action.force for action in made.actions if isinstance(action, Evict)] == [False]


def test_force_past_the_deadline_spares_jobs_that_opted_out() -> None:
    pods = [pod("held"), pod("bare", stay=StayReason.UNMANAGED), pod("w", stay=StayReason.OPTED_OUT)]
    made = plan(marked(pods=pods), alerts=[alert()], now=NOW + timedelta(hours=1), force=True)
    evicted = {action.pod.name: action.force for action in made.actions if isinstance(action, Evict)}
    assert evicted == {"held": True, "bare": True}


@pytest.mark.parametrize("stay", [StayReason.OPTED_OUT, StayReason.UNMANAGED])
def test_a_pod_that_must_not_be_evicted_keeps_its_node(stay: StayReason) -> None:
    told = [alert(mode=Mode.REPLACE)]
    made = plan(marked(mode=Mode.REPLACE, pods=[pod("w", stay=stay)]), alerts=told, mode=Mode.REPLACE)
    assert made.actions == ()
    assert only(made).reason == "DrainWaits"
    assert "ml/w" in only(made).message


def test_a_drained_node_stays_cordoned_while_its_alert_lasts() -> None:
    made = plan(marked(), alerts=[alert()])
    assert (made.actions, reasons(made)) == ((), ["NodeDrained"])


def test_a_drained_node_is_replaced_once_its_mark_says_so() -> None:
    made = plan(marked(mode=Mode.REPLACE), alerts=[alert(mode=Mode.REPLACE)], mode=Mode.REPLACE)
    first, second = made.actions
    assert isinstance(first, SetMark)
    assert first.mark.terminating_since == NOW
    assert isinstance(second, Terminate)
    assert [entry.node for entry in made.history] == ["n0"], "the rate knows of it once the node is gone"


def test_a_replacement_that_began_is_retried_regardless() -> None:
    node = marked(mode=Mode.REPLACE, terminating_since=NOW)
    made = plan(node, alerts=[alert(firing=False)], mode=Mode.REPLACE, now=NOW + timedelta(hours=2))
    assert [type(action) for action in made.actions if not isinstance(action, SetMark)] == [Terminate]


@pytest.mark.parametrize(
    ("change", "setting", "reason"),
    [
        ({"unschedulable": False}, Mode.REPLACE, "UncordonedExternally"),
        ({}, Mode.DRAIN, "NodeDraining"),
        ({}, Mode.CORDON, "NodeCordoned"),
        ({"pods": (pod(patience=2 * MINUTE),)}, Mode.REPLACE, "NodeDraining"),
    ],
)
def test_a_replacement_ends_where_the_node_is_in_use_again(
    change: dict[str, Any], setting: Mode, reason: str
) -> None:
    node = marked(mode=Mode.REPLACE, pods=[pod(patience=2 * MINUTE)], terminating_since=NOW)
    made = plan(replace(node, **change), alerts=[alert(mode=Mode.REPLACE)], mode=setting, now=NOW + 60 * MINUTE)
    (action,) = made.actions
    assert isinstance(action, SetMark), "a pod that came has its job's time for a checkpoint"
    assert (action.mark.terminating_since, reasons(made)) == (None, [reason])


@pytest.mark.parametrize("begun", [None, NOW])
def test_pods_that_were_not_read_are_not_taken_for_gone(begun: datetime | None) -> None:
    node = replace(marked(mode=Mode.REPLACE, terminating_since=begun), pods=None)
    made = plan(node, alerts=[alert(mode=Mode.REPLACE)], mode=Mode.REPLACE)
    assert made.actions == ()
    assert reasons(made) == ["NodeReplaced" if begun else "NodeDraining"]
    assert reasons(plan(node, alerts=[alert()], now=NOW + timedelta(hours=1))) == ["NodeDraining"]


def test_a_dead_nodes_pods_are_not_waited_for() -> None:
    node = replace(marked(mode=Mode.REPLACE, pods=[pod(deleted_at=NOW)]), ready=False)
    made = plan(node, alerts=[alert(mode=Mode.REPLACE)], mode=Mode.REPLACE)
    assert any(isinstance(action, Terminate) for action in made.actions)


def test_a_node_is_released_when_all_its_alerts_stay_resolved() -> None:
    resolved = [alert(firing=False)]
    made = plan(marked(pods=[pod()]), alerts=resolved)
    (action,) = made.actions
    assert isinstance(action, SetMark)
    assert (action.mark.alerts, action.mark.clear_since) == ((), NOW), "and nothing more is evicted meanwhile"
    assert reasons(made) == ["AlertsResolved"]
    cleared = replace(marked(), mark=action.mark)
    assert plan(cleared, now=NOW + 9 * MINUTE).actions == ()
    late = plan(cleared, now=NOW + 10 * MINUTE)
    (release,) = late.actions
    assert isinstance(release, Release)
    assert release.uncordon
    assert [entry.node for entry in late.history] == ["n0"]


def test_one_of_two_alerts_resolved_changes_nothing_but_the_mark() -> None:
    node = marked(alerts=("Hot-n0", "Warm-n0"))
    (action,) = plan(node, alerts=[alert(firing=False)]).actions
    assert isinstance(action, SetMark)
    assert (action.mark.alerts, action.mark.clear_since) == (("Warm-n0",), None)


def test_silence_after_a_restart_releases_nothing() -> None:
    """The alerts that a mark names still fire until Alertmanager says otherwise."""
    made = plan(marked(), alerts=[], now=NOW + timedelta(days=3))
    assert not any(isinstance(action, Release) for action in made.actions)


def test_where_a_person_is_to_un_cordon_nothing_else_does() -> None:
    cleared = marked(alerts=(), clear_since=NOW, draining_since=None)
    made = plan(cleared, now=NOW + timedelta(days=3), release_after=None)
    assert (made.actions, reasons(made)) == ((), ["AlertsResolved"])


def test_a_node_that_somebody_uncordoned_is_left_alone() -> None:
    lifted = replace(marked(pods=[pod()]), unschedulable=False)
    made = plan(lifted, alerts=[alert()])
    (action,) = made.actions
    assert isinstance(action, SetMark)
    assert (action.mark.overruled, action.cordon) == (True, False)
    assert reasons(made) == ["UncordonedExternally"]
    later = replace(lifted, mark=action.mark)
    assert plan(later, alerts=[alert()]).actions == ()
    (release,) = plan(later, alerts=[alert(firing=False)]).actions
    assert isinstance(release, Release)
    assert not release.uncordon


RESOLVED_LONG_AGO = {"alerts": (), "clear_since": NOW - 20 * MINUTE, "draining_since": None}


def test_a_gpu_that_needs_a_reset_keeps_its_node_marked() -> None:
    """A GPU that fell off the bus is not exported any more, and Alertmanager reports its alert as resolved."""
    made = plan(machine(boot_id="b1"), alerts=[alert(until_reboot=True)])
    (action,) = made.actions
    assert isinstance(action, SetMark)
    assert (action.mark.until_reboot, action.mark.boot_id) == (True, "b1")

    mark = {**RESOLVED_LONG_AGO, "until_reboot": True, "boot_id": "b1"}
    made = plan(replace(marked(**mark), boot_id="b1"), alerts=[alert(firing=False)])
    assert (made.actions, reasons(made)) == ((), ["AlertsResolved"])
    assert "uncordoned after a reboot" in only(made).message
    assert "kubectl uncordon n0" in only(made).message

    (released,) = plan(replace(marked(**mark), boot_id="b2"), alerts=[alert(firing=False)]).actions
    assert isinstance(released, Release)
    assert released.uncordon


@pytest.mark.parametrize(
    ("change", "says"), [({"ready": False}, "once it is Ready"), ({"gpus": 7}, "7 of 8 GPUs"), ({"gpus": 8}, "")]
)
def test_a_node_that_is_not_well_is_not_given_back(change: dict[str, Any], says: str) -> None:
    made = plan(replace(marked(gpus=8, **RESOLVED_LONG_AGO), **{"gpus": 8, **change}))
    assert bool(made.actions) is (not says)
    assert says in only(made).message


def test_an_alert_older_than_the_node_is_about_another_machine() -> None:
    node = machine(created=NOW + MINUTE)
    made = plan(node, alerts=[alert()], now=NOW + 2 * MINUTE)
    assert (made.actions, reasons(made)) == ((), ["StaleAlert"])
    again = alert(started=NOW + 2 * MINUTE)
    assert reasons(plan(node, alerts=[again], now=NOW + 2 * MINUTE)) == ["NodeCordoned"]


def test_what_an_alert_asked_for_ends_with_the_alert() -> None:
    """Replace was asked for by an alert that is resolved; the one that lasts asks for a cordon."""
    node = marked(mode=Mode.REPLACE, alerts=("Dead-n0", "Hot-n0"), pods=[pod()])
    told = [alert(name="Dead", mode=Mode.REPLACE, firing=False), alert(mode=Mode.CORDON)]
    made = plan(node, alerts=told, mode=Mode.REPLACE)
    (action,) = made.actions
    assert isinstance(action, SetMark)
    assert (action.mark.mode, action.mark.draining_since, action.mark.alerts) == (Mode.CORDON, None, ("Hot-n0",))
    assert action.mark.message == "alert Hot"


def test_silence_about_an_alert_does_not_lower_the_mode() -> None:
    """After a restart, what Alertmanager has not repeated yet is not known."""
    node = marked(mode=Mode.DRAIN, alerts=("Dead-n0", "Hot-n0"))
    made = plan(node, alerts=[alert(mode=Mode.CORDON)])
    assert not any(action.mark.mode < Mode.DRAIN for action in made.actions if isinstance(action, SetMark))


def test_a_machine_that_the_cloud_is_told_to_replace_is_replaced() -> None:
    node = marked(mode=Mode.REPLACE, alerts=("Dead-n0", "Hot-n0"), terminating_since=NOW - MINUTE)
    told = [alert(name="Dead", mode=Mode.REPLACE, firing=False), alert(mode=Mode.CORDON)]
    assert any(isinstance(action, Terminate) for action in plan(node, alerts=told, mode=Mode.REPLACE).actions)


def test_a_mark_without_news_is_reported_with_the_way_out() -> None:
    """An alert that is silenced and ends in silence is never reported as resolved."""
    late = NOW + timedelta(hours=13)
    sight = FleetSnapshot(rules=rules(), alerts=(alert(),), machines=(marked(pods=[pod()]),), listens_since=NOW)
    made = remedy(sight, late)
    assert (made.actions, reasons(made)) == ((), ["AlertUnheard"])
    assert "kubectl uncordon n0" in only(made).message
    assert reasons(remedy(replace(sight, alerts=(alert(heard=late),)), late)) == ["DrainIncomplete"]
    assert reasons(remedy(replace(sight, alerts=(), listens_since=late), late)) == ["DrainIncomplete"]
    lifted = replace(marked(overruled=True), unschedulable=False)
    assert reasons(remedy(replace(sight, machines=(lifted,)), late)) == ["NodeReleased"]


def test_an_alert_that_had_not_ended_is_acted_on_at_once_again() -> None:
    """Prometheus was away: Alertmanager reported all alerts as resolved, and five nodes were released."""
    names = [f"n{number}" for number in range(5)]
    history = [HistoryEntry(node=name, started=NOW + MINUTE, ended=NOW + 12 * MINUTE) for name in names]
    later = NOW + 13 * MINUTE
    nodes = [machine(name) for name in names]
    made = plan(*nodes, alerts=[alert(name) for name in names], now=later, history=history, max_per_hour=2)
    assert reasons(made) == ["NodeCordoned"] * 5
    anew = plan(*nodes, alerts=[alert(name, started=later) for name in names], now=later, history=history)
    assert reasons(anew) == ["CoolingDown"] * 5


def test_a_mark_that_was_overruled_ends_when_its_node_boots() -> None:
    """The exporter's gauge keeps its last XID: the alert would last, and hide the next one."""
    lifted = replace(marked(overruled=True, boot_id="b1"), unschedulable=False, boot_id="b1")
    assert reasons(plan(lifted, alerts=[alert()])) == ["UncordonedExternally"]
    made = plan(replace(lifted, boot_id="b2"), alerts=[alert()])
    (release,) = made.actions
    assert isinstance(release, Release)
    assert not release.uncordon


def test_with_force_a_pod_whose_deletion_hangs_is_not_waited_for() -> None:
    hangs = pod("hangs", deleted_at=NOW)
    node = marked(mode=Mode.REPLACE, pods=[hangs])
    asked = {"alerts": [alert(mode=Mode.REPLACE, heard=NOW + timedelta(hours=1))], "mode": Mode.REPLACE}
    late = NOW + timedelta(hours=1)
    assert reasons(plan(node, now=late, **asked)) == ["DrainIncomplete"]
    forced = plan(node, now=late, force=True, **asked)
    assert any(isinstance(action, Terminate) for action in forced.actions)
    opted_out = replace(node, pods=(replace(hangs, stay=StayReason.OPTED_OUT),))
    assert not any(isinstance(action, Terminate) for action in plan(opted_out, now=late, force=True, **asked).actions)


def test_a_worse_alert_raises_the_mode_of_a_mark() -> None:
    made = plan(marked(mode=Mode.CORDON), alerts=[alert(name="Dead")])
    (action,) = made.actions
    assert isinstance(action, SetMark)
    assert (action.mark.mode, action.mark.draining_since) == (Mode.DRAIN, NOW)


@pytest.mark.parametrize("change", [{"mode": Mode.OBSERVE}, {"dry_run": True}])
def test_marks_of_an_earlier_setting_are_told_and_not_touched(change: dict[str, Any]) -> None:
    made = plan(marked(pods=[pod()]), alerts=[alert()], **change)
    assert (made.actions, reasons(made)) == ((), ["StaleRemediationMark"])
