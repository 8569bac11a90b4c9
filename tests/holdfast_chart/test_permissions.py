"""Roles and bindings: no more than the operator needs, and what users of the cluster's roles may do with jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from charted import MONITORING, NAMESPACED, all_of, container, environment, is_aggregated, one, pod_of, rules

from holdfast_operator.api.names import LEASE_NAME
from holdfast_testbed.errors import TestbedError
from holdfast_testbed.fakes.chart import render

pytestmark = pytest.mark.integration  # needs the Helm CLI


def test_no_right_is_a_wildcard() -> None:
    for _kind, rule in rules(render()):
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_secrets_are_read_in_the_operators_namespace_and_by_name_only() -> None:
    for kind, rule in rules(render()):
        if "secrets" in rule["resources"]:
            assert kind == "Role"
            assert rule["verbs"] == ["create"] or set(rule["resourceNames"]) <= {"holdfast-ca", "holdfast-key"}


def test_the_lease_is_written_in_the_operators_namespace_and_by_its_name_only() -> None:
    documents = render()
    granted = [rule for rule in one(documents, "Role", "holdfast")["rules"] if "leases" in rule["resources"]]
    assert [rule["verbs"] for rule in granted] == [["get", "update"], ["create"]]
    assert granted[0]["resourceNames"] == [LEASE_NAME]
    elsewhere = [rule for document in all_of(documents, "ClusterRole") for rule in document["rules"]]
    assert not any("leases" in rule["resources"] for rule in elsewhere)


def test_nothing_can_be_granted_run_or_impersonated() -> None:
    granted = {
        (resource, verb) for _k, rule in rules(render()) for resource in rule["resources"] for verb in rule["verbs"]
    }
    for resource in (
        "roles",
        "clusterroles",
        "rolebindings",
        "clusterrolebindings",
        "serviceaccounts/token",
        "pods/exec",
    ):
        assert not any(found == resource for found, _verb in granted)
    assert not any(verb in ("bind", "escalate", "impersonate") for _resource, verb in granted)


def test_users_with_edit_may_create_jobs_and_those_with_view_read_them() -> None:
    granted = {
        label.rpartition("-")[2]: {verb for rule in document["rules"] for verb in rule["verbs"]}
        for document in all_of(render(), "ClusterRole")
        for label in document["metadata"]["labels"]
        if "aggregate-to" in label
    }
    writes = {"create", "delete", "deletecollection", "patch", "update"}
    assert granted == {"admin": writes, "edit": writes, "view": {"get", "list", "watch"}}
    without = render("rbac.aggregate=false")
    assert [is_aggregated(document) for document in all_of(without, "ClusterRole")] == [False]


def test_an_administrator_can_bring_account_and_roles() -> None:
    documents = render("rbac.create=false", "serviceAccount.create=false", "serviceAccount.name=mine")
    kinds = {document["kind"] for document in documents}
    assert not kinds & {"ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    assert pod_of(documents)["serviceAccountName"] == "mine"
    assert pod_of(render("serviceAccount.create=false"))["serviceAccountName"] == "default"


def test_a_named_account_is_created_and_bound() -> None:
    documents = render("serviceAccount.name=mine", "serviceAccount.annotations.role=x")
    account = one(documents, "ServiceAccount")["metadata"]
    assert (account["name"], account["annotations"]) == ("mine", {"role": "x"})
    bindings = [document for document in documents if document["kind"].endswith("Binding")]
    assert {subject["name"] for binding in bindings for subject in binding["subjects"]} == {"mine"}


def node_rights(*values: str) -> set[tuple[str, str]]:
    token = "nodeRemediation.token.secretName=alerts"
    return {
        (resource, verb)
        for _kind, rule in rules(render(token, *values))
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if resource in ("nodes", "pods/eviction")
    }


READS = {("nodes", "get"), ("nodes", "list"), ("nodes", "watch")}
CORDONS = READS | {("nodes", "patch")}
DRAINS = CORDONS | {("pods/eviction", "create")}


@pytest.mark.parametrize(
    ("values", "granted"),
    [
        ([], READS),
        (["nodeRemediation.mode=Cordon"], CORDONS),
        (["nodeRemediation.mode=Drain"], DRAINS),
        (["nodeRemediation.mode=Drain", "nodeRemediation.dryRun=true"], READS),
        (["nodeRemediation.mode=Replace", "nodeRemediation.provider=AWS"], DRAINS),
    ],
)
def test_rights_over_nodes_come_with_their_mode(values: list[str], granted: set[tuple[str, str]]) -> None:
    assert node_rights(*values) == granted


def test_the_operator_reads_what_it_may_do_with_nodes_as_it_stands_in_the_values() -> None:
    from holdfast_operator.api.node_mark import Mode
    from holdfast_operator.remediation.settings import RemediationSettings, parse_rules

    assert parse_rules(environment(render())["HOLDFAST_NODE_REMEDIATION"]) == RemediationSettings()
    alert = "nodeRemediation.alerts[0]"
    documents = render(
        "nodeRemediation.mode=Replace",
        "nodeRemediation.provider=AWS",
        "nodeRemediation.token.secretName=alerts-secret",
        "nodeRemediation.maxUnavailable=3",
        f"{alert}.alert=Xid,{alert}.action=Drain",
    )
    env = environment(documents)
    made = parse_rules(env["HOLDFAST_NODE_REMEDIATION"], env["HOLDFAST_ALERTS_TOKEN_FILE"])
    assert (made.mode, made.alerts[0].action, made.max_unavailable.of(100)) == (Mode.REPLACE, Mode.DRAIN, 3)
    mounts = {mount["name"]: mount["mountPath"] for mount in container(documents)["volumeMounts"]}
    assert made.token_file == f"{mounts['alerts-token']}/token"
    assert "alerts-secret" not in env["HOLDFAST_NODE_REMEDIATION"]


def test_replace_without_a_cloud_is_refused() -> None:
    with pytest.raises(TestbedError, match="provider"):
        render("nodeRemediation.mode=Replace", "nodeRemediation.token.secretName=alerts")


def identities(documents: Sequence[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]) for d in documents}


def test_two_releases_share_no_object() -> None:
    first = render(*MONITORING, namespace="a", release="one")
    second = render(*MONITORING, "crds.enabled=false", namespace="b", release="two")
    assert identities(first) & identities(second) == set()


def test_two_installations_for_namespaces_of_their_own_share_no_object() -> None:
    first = render("watchNamespaces={team-a}", namespace="a")
    second = render("watchNamespaces={team-b}", "crds.enabled=false", namespace="b")
    assert identities(first) & identities(second) == set()


def test_watching_some_namespaces_takes_rights_there_and_no_more() -> None:
    documents, everywhere = render(*NAMESPACED), render()
    cluster = one(documents, "ClusterRole", "holdfast-holdfast-system")
    assert {(resource, *rule["verbs"]) for rule in cluster["rules"] for resource in rule["resources"]} == {
        ("nodes", "get", "list", "watch"),
        ("tokenreviews", "create"),
    }
    roles = {d["metadata"]["namespace"]: d for d in all_of(documents, "Role")}
    assert roles.keys() == {"holdfast-system", "kube-node-lease", "team-a", "team-b"}
    assert roles["team-a"]["rules"] == roles["team-b"]["rules"]
    both = [*cluster["rules"], *roles["team-a"]["rules"]]
    assert sorted(map(str, both)) == sorted(map(str, one(everywhere, "ClusterRole", "holdfast")["rules"]))
    assert environment(documents)["HOLDFAST_WATCH_NAMESPACES"] == "team-a,team-b"
    assert "HOLDFAST_WATCH_NAMESPACES" not in environment(everywhere)


def test_every_role_is_bound_to_the_operator() -> None:
    documents = render(*NAMESPACED)
    for kind in ("Role", "ClusterRole"):
        found = [d for d in all_of(documents, kind) if not is_aggregated(d)]
        roles = {(d["metadata"].get("namespace"), d["metadata"]["name"]) for d in found}
        bindings = all_of(documents, f"{kind}Binding")
        assert roles == {(d["metadata"].get("namespace"), d["roleRef"]["name"]) for d in bindings}
        assert {d["roleRef"]["kind"] for d in bindings} == {kind}
        (subject,) = {str(subject) for d in bindings for subject in d["subjects"]}
        assert "holdfast-system" in subject


@pytest.mark.parametrize("values", [("nodeRemediation.mode=Drain",), ()])
def test_nodes_are_not_remediated_on_the_word_of_some_namespaces(values: tuple[str, ...]) -> None:
    with pytest.raises(TestbedError, match="watchNamespaces"):
        render(*NAMESPACED, "nodeRemediation.token.secretName=alerts", *values)


@pytest.mark.parametrize(
    ("value", "resource", "variable"),
    [
        ("networkPolicy", "networkpolicies", "HOLDFAST_NETWORK_POLICIES"),
        ("disruptionBudgets", "poddisruptionbudgets", "HOLDFAST_DISRUPTION_BUDGETS"),
    ],
)
def test_what_is_not_to_be_made_for_jobs_the_operator_has_no_right_to_make(
    value: str, resource: str, variable: str
) -> None:
    def right(documents: Sequence[dict[str, Any]]) -> list[str]:
        return [verb for _k, rule in rules(documents) if resource in rule["resources"] for verb in rule["verbs"]]

    assert right(render()) == ["get", "create", "patch"]
    assert environment(render())[variable] == "true"
    assert right(render(f"{value}.jobs=false")) == []
    assert environment(render(f"{value}.jobs=false"))[variable] == "false"
