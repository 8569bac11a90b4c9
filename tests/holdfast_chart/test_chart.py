"""The chart as the real Helm CLI renders it: what it asks for, what it grants, what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from holdfast_operator import helm_test
from holdfast_operator.api.job import parse_job
from holdfast_operator.api.names import LEASE_NAME
from holdfast_operator.api.status import Worker
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.manifests.pod import pod
from holdfast_operator.settings import from_environment
from holdfast_testbed.build.commands import run
from holdfast_testbed.build.programs import program
from holdfast_testbed.errors import TestbedError
from holdfast_testbed.fakes.chart import CHART, render
from holdfast_testbed.fakes.network_policy import End, Flow, allowed

pytestmark = pytest.mark.integration  # needs the Helm CLI


def one(documents: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    found = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} objects of kind {kind}"
    return found[0]


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (only,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def environment(documents: list[dict[str, Any]]) -> dict[str, str]:
    return {v["name"]: v["value"] for v in container(documents)["env"] if "value" in v}


def test_lint_finds_nothing() -> None:
    assert "0 chart(s) failed" in run([program("helm"), "lint", "--strict", CHART])


def test_two_operators_stand_on_two_nodes_where_they_can() -> None:
    spec = one(render(), "Deployment")["spec"]
    assert spec["replicas"] == 2
    (preferred,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"].popitem()[1]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_an_affinity_of_ones_own_takes_the_place_of_ours() -> None:
    documents = render("affinity.nodeAffinity.x=y", "replicas=1")
    spec = one(documents, "Deployment")["spec"]
    assert spec["replicas"] == 1
    assert spec["template"]["spec"]["affinity"] == {"nodeAffinity": {"x": "y"}}


def test_the_lease_is_written_in_the_operators_namespace_and_by_its_name_only() -> None:
    documents = render()
    granted = [rule for rule in one(documents, "Role", "holdfast")["rules"] if "leases" in rule["resources"]]
    assert [rule["verbs"] for rule in granted] == [["get", "update"], ["create"]]
    assert granted[0]["resourceNames"] == [LEASE_NAME]
    elsewhere = [rule for document in documents if document["kind"] == "ClusterRole" for rule in document["rules"]]
    assert not any("leases" in rule["resources"] for rule in elsewhere)


def test_each_replica_is_told_its_own_name_address_and_memory_limit() -> None:
    found = {v["name"]: v["valueFrom"] for v in container(render())["env"] if "valueFrom" in v}
    assert found["HOLDFAST_POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert found["HOLDFAST_POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert found["HOLDFAST_MEMORY_BYTES"] == {"resourceFieldRef": {"resource": "limits.memory"}}


def test_a_pause_of_a_minute_does_not_restart_the_operator() -> None:
    probe = container(render())["livenessProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 120


def test_the_operator_meets_the_restricted_standard() -> None:
    documents = render()
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = container(documents)["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {next(iter(set(volume) - {"name"})) for volume in pod["volumes"]} == {"emptyDir"}


OPENSHIFT = ("podSecurityContext.runAsUser=null", "podSecurityContext.runAsGroup=null", "sidecar.runAsUser=null")


def test_openshift_chooses_the_users() -> None:
    """Its restricted-v2 refuses a fixed user, in the operator's pod, the test's and every worker's sidecar."""
    documents = render(*OPENSHIFT)
    assert "runAsUser" not in json.dumps(documents)
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "runAsUser" not in json.dumps(hooks(*OPENSHIFT))
    sidecar = sidecar_of(documents)["securityContext"]
    assert "runAsUser" not in sidecar
    assert sidecar["runAsNonRoot"] is True


def test_the_sidecar_has_a_user_of_its_own_by_default() -> None:
    assert sidecar_of(render())["securityContext"]["runAsUser"] == 65532


def test_a_quota_on_cpu_limits_is_met_by_a_value() -> None:
    resources = sidecar_of(render("sidecar.resources.limits.cpu=100m"))["resources"]
    assert resources == {"requests": {"cpu": "10m", "memory": "48Mi"}, "limits": {"memory": "96Mi", "cpu": "100m"}}


def test_a_proxy_and_a_private_ca_are_values() -> None:
    documents = render(
        "extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=http://proxy:3128",
        "extraVolumes[0].name=ca,extraVolumes[0].configMap.name=ca",
        "extraVolumeMounts[0].name=ca,extraVolumeMounts[0].mountPath=/ca",
        "commonLabels.team=ml",
    )
    assert environment(documents)["HTTPS_PROXY"] == "http://proxy:3128"
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    assert {"name": "ca", "configMap": {"name": "ca"}} in pod["volumes"]
    assert {"name": "ca", "mountPath": "/ca"} in container(documents)["volumeMounts"]
    assert {document["metadata"]["labels"]["team"] for document in documents} == {"ml"}


def test_a_drain_never_takes_all_replicas_at_once() -> None:
    documents = render()
    budget = one(documents, "PodDisruptionBudget")["spec"]
    labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    assert not [d for d in render("replicas=1") if d["kind"] == "PodDisruptionBudget"], "no node could be drained"


def test_users_with_edit_may_create_jobs_and_those_with_view_read_them() -> None:
    granted = {
        label.rpartition("-")[2]: {verb for rule in document["rules"] for verb in rule["verbs"]}
        for document in render()
        if document["kind"] == "ClusterRole"
        for label in document["metadata"]["labels"]
        if "aggregate-to" in label
    }
    writes = {"create", "delete", "deletecollection", "patch", "update"}
    assert granted == {"admin": writes, "edit": writes, "view": {"get", "list", "watch"}}
    assert all(of_the_operator(d) for d in render("rbac.aggregate=false") if d["kind"] == "ClusterRole")


def sidecar_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The sidecar that an operator with these values adds to a worker's pod."""
    found = from_environment(environment(documents) | {"HOLDFAST_NAMESPACE": "x"})
    platform = Installation(
        sidecar_image=found.sidecar_image,
        agents_url=found.agents_url,
        ca_bundle="PEM",
        sidecar_user=found.sidecar_user,
        sidecar_resources=found.sidecar_resources,
    )
    sidecar: dict[str, Any] = worker_pod_on(platform)["spec"]["initContainers"][0]
    return sidecar


def test_agents_are_given_a_name_that_the_certificate_has() -> None:
    env = environment(render(namespace="ops"))
    assert env["HOLDFAST_AGENTS_URL"] == "https://holdfast.ops.svc:8443"
    assert env["HOLDFAST_DCGM_URL"] == "http://$$(HOLDFAST_HOST_IP):9400/metrics", (
        "the sidecar's variable, not its own"
    )
    assert "holdfast.ops.svc" in env["HOLDFAST_AGENTS_NAMES"].split(",")


@pytest.mark.parametrize(
    ("address", "url"),
    [("10.96.0.200", "https://10.96.0.200:8443"), ("fd00::7", "https://[fd00::7]:8443")],
)
def test_without_dns_agents_are_given_the_cluster_ip(address: str, url: str) -> None:
    documents = render(f"service.clusterIP={address}")
    env = environment(documents)
    assert one(documents, "Service")["spec"]["clusterIP"] == address
    assert env["HOLDFAST_AGENTS_URL"] == url
    assert address in env["HOLDFAST_AGENTS_NAMES"].split(",")


@pytest.mark.parametrize(
    ("url", "name"), [("https://holdfast.example:443", "holdfast.example"), ("https://[fd00::9]:443", "fd00::9")]
)
def test_an_address_of_ones_own_is_in_the_certificate(url: str, name: str) -> None:
    env = environment(render(f"agents.url={url}", "agents.extraNames={a.example,192.0.2.7}"))
    assert env["HOLDFAST_AGENTS_URL"] == url
    assert {name, "a.example", "192.0.2.7"} <= set(env["HOLDFAST_AGENTS_NAMES"].split(","))


def test_images_have_the_charts_version_unless_told_otherwise() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    documents = render()
    assert container(documents)["image"] == f"docker.io/holdfast/operator:{version}"
    assert environment(documents)["HOLDFAST_SIDECAR_IMAGE"] == f"docker.io/holdfast/sidecar:{version}"
    documents = render("image.tag=1.2.3", "sidecar.image.repository=r.example/s", "sidecar.image.tag=v4")
    assert container(documents)["image"] == "docker.io/holdfast/operator:1.2.3"
    assert environment(documents)["HOLDFAST_SIDECAR_IMAGE"] == "r.example/s:v4"


def of_the_operator(document: dict[str, Any]) -> bool:
    """Whether a role is bound to the operator, and none that the cluster's own roles take over."""
    return not any("aggregate-to" in label for label in document["metadata"]["labels"])


def rules(documents: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for document in documents:
        if document["kind"] in ("ClusterRole", "Role") and of_the_operator(document):
            for rule in document["rules"]:
                yield document["kind"], rule


def test_no_right_is_a_wildcard() -> None:
    for _kind, rule in rules(render()):
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_secrets_are_read_in_the_operators_namespace_and_by_name_only() -> None:
    for kind, rule in rules(render()):
        if "secrets" in rule["resources"]:
            assert kind == "Role"
            assert rule["verbs"] == ["create"] or set(rule["resourceNames"]) <= {"holdfast-ca", "holdfast-key"}


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


def test_all_that_may_be_said_about_nodes_has_a_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["nodeRemediation"]
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["nodeRemediation"]
    assert set(values) == set(schema["properties"])


def test_replace_without_a_cloud_is_refused() -> None:
    with pytest.raises(TestbedError, match="provider"):
        render("nodeRemediation.mode=Replace", "nodeRemediation.token.secretName=alerts")


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


def test_two_releases_share_no_object() -> None:
    def identities(documents: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
        return {(d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]) for d in documents}

    first = render(*MONITORING, namespace="a", release="one")
    second = render(*MONITORING, namespace="b", release="two")
    assert identities(first) & identities(second) == set()


def test_network_policies_can_be_turned_off_and_narrowed() -> None:
    policies = [d for d in render() if d["kind"] == "NetworkPolicy"]
    assert {kind for policy in policies for kind in policy["spec"]["policyTypes"]} == {"Ingress", "Egress"}
    assert not [d for d in render("networkPolicy.enabled=false") if d["kind"] == "NetworkPolicy"]
    narrowed = one(
        render("networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring"),
        "NetworkPolicy",
        "holdfast-ingress",
    )
    assert narrowed["spec"]["ingress"][1]["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]


def test_who_reaches_the_operator_and_whom_it_reaches() -> None:
    documents = render()
    policies = [d for d in documents if d["kind"] == "NetworkPolicy"]
    ports = {port["name"]: port["containerPort"] for port in container(documents)["ports"]}
    template = one(documents, "Deployment")["spec"]["template"]
    operator = End(namespace="holdfast-system", labels=template["metadata"]["labels"], ports=ports)
    pod, host = End(namespace="ml", labels={"app": "x"}), End()
    flows = {
        "a sidecar's report": (pod, operator, 8443, True),
        "a sidecar's report with the host's network": (host, operator, 8443, True),
        "a scrape": (pod, operator, 8080, True),
        "a scrape from outside": (host, operator, 8080, False),
        "any other port": (pod, operator, 9000, False),
        "the API server": (operator, host, 6443, True),
        "anything else": (operator, host, 22, False),
        "a worker": (operator, pod, 29400, False),
        "another pod beside it": (pod, End(namespace="holdfast-system"), 9000, True),
    }
    found = {
        name: allowed(policies, Flow(source=source, target=target, port=port))
        for name, (source, target, port, _) in flows.items()
    }
    assert found == {name: flow[3] for name, flow in flows.items()}


REPLACES = ("nodeRemediation.mode=Replace", "nodeRemediation.provider=AWS", "nodeRemediation.token.secretName=alerts")


@pytest.mark.parametrize("address", ["169.254.170.23", "169.254.169.254", "fd00:ec2::23"])
def test_credentials_of_aws_are_reached_where_machines_are_replaced(address: str) -> None:
    """By Pod Identity or the node's role, both at port 80; nothing else is, and nothing without AWS."""

    def reached(documents: list[dict[str, Any]], address: str, port: int) -> bool:
        template = one(documents, "Deployment")["spec"]["template"]
        operator = End(namespace="holdfast-system", labels=template["metadata"]["labels"])
        policies = [d for d in documents if d["kind"] == "NetworkPolicy"]
        return allowed(policies, Flow(source=operator, target=End(address=address), port=port))

    assert reached(render(*REPLACES), address, 80)
    assert not reached(render(*REPLACES), address, 8080)
    assert not reached(render(*REPLACES), "192.0.2.1", 80)
    assert not reached(render(), address, 80)


NAMESPACED = ("watchNamespaces={team-a,team-b}",)


def test_watching_some_namespaces_takes_rights_there_and_no_more() -> None:
    documents, everywhere = render(*NAMESPACED), render()
    cluster = one(documents, "ClusterRole", "holdfast-holdfast-system")
    assert {(resource, *rule["verbs"]) for rule in cluster["rules"] for resource in rule["resources"]} == {
        ("nodes", "get", "list", "watch"),
        ("tokenreviews", "create"),
    }
    roles = {d["metadata"]["namespace"]: d for d in documents if d["kind"] == "Role"}
    assert roles.keys() == {"holdfast-system", "kube-node-lease", "team-a", "team-b"}
    assert roles["team-a"]["rules"] == roles["team-b"]["rules"]
    both = [*cluster["rules"], *roles["team-a"]["rules"]]
    assert sorted(map(str, both)) == sorted(map(str, one(everywhere, "ClusterRole", "holdfast")["rules"]))
    assert environment(documents)["HOLDFAST_WATCH_NAMESPACES"] == "team-a,team-b"
    assert "HOLDFAST_WATCH_NAMESPACES" not in environment(everywhere)


def test_every_role_is_bound_to_the_operator() -> None:
    documents = render(*NAMESPACED)
    for kind in ("Role", "ClusterRole"):
        found = [d for d in documents if d["kind"] == kind and of_the_operator(d)]
        roles = {(d["metadata"].get("namespace"), d["metadata"]["name"]) for d in found}
        bindings = [d for d in documents if d["kind"] == f"{kind}Binding"]
        assert roles == {(d["metadata"].get("namespace"), d["roleRef"]["name"]) for d in bindings}
        assert {d["roleRef"]["kind"] for d in bindings} == {kind}
        (subject,) = {str(subject) for d in bindings for subject in d["subjects"]}
        assert "holdfast-system" in subject


def test_the_pod_monitor_looks_where_the_operator_does() -> None:
    spec = one(render(*MONITORING, *NAMESPACED), "PodMonitor")["spec"]
    assert spec["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}


def test_two_installations_for_namespaces_of_their_own_share_no_object() -> None:
    found = [
        {(d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]) for d in documents}
        for documents in (
            render("watchNamespaces={team-a}", namespace="a"),
            render("watchNamespaces={team-b}", namespace="b"),
        )
    ]
    assert found[0] & found[1] == set()


@pytest.mark.parametrize("values", [("nodeRemediation.mode=Drain",), ()])
def test_nodes_are_not_remediated_on_the_word_of_some_namespaces(values: tuple[str, ...]) -> None:
    with pytest.raises(TestbedError, match="watchNamespaces"):
        render(*NAMESPACED, "nodeRemediation.token.secretName=alerts", *values)


def hooks(*values: str) -> list[dict[str, Any]]:
    """What `helm test` makes."""
    found = render(*values, hooks=True)
    return [d for d in found if "helm.sh/hook" in (d["metadata"].get("annotations") or {})]


def smoke_job(*values: str) -> dict[str, Any]:
    """The job of `helm test`."""
    (only,) = one(hooks(*values), "Pod")["spec"]["containers"]
    *command, job, _seconds = only["command"]
    assert command == ["python", "-m", helm_test.__name__]
    found: dict[str, Any] = json.loads(job)
    return found


def test_helm_test_runs_a_job_that_the_operator_understands() -> None:
    job = smoke_job()
    times = {"creationTimestamp": "2026-01-31T12:00:00Z", "resourceVersion": "1", "generation": 1, "uid": "u"}
    spec = parse_job({**job, "metadata": {**job["metadata"], **times}}).spec
    assert spec is not None
    assert spec.replicas == 2
    assert trainer(job)["image"] == "docker.io/holdfast/trainer:dev"
    assert trainer(job)["command"][:3] == ["holdfast", "run", "--"]


def trainer(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["spec"]["workers"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_the_tests_pods_take_what_the_cluster_needs() -> None:
    more = "test.container.resources.requests.cpu=2"
    job = smoke_job("test.podSpec.nodeSelector.gpu=no", more, "test.image.tag=v9")
    assert job["spec"]["workers"]["template"]["spec"]["nodeSelector"] == {"gpu": "no"}
    assert trainer(job)["resources"]["requests"] == {"cpu": 2, "memory": "256Mi"}
    assert trainer(job)["image"].endswith(":v9")


def test_the_test_may_touch_its_own_job_only_and_leaves_nothing() -> None:
    found = hooks()
    assert {d["kind"] for d in found} == {"ServiceAccount", "Role", "RoleBinding", "Pod"}
    named, create = one(found, "Role")["rules"]
    assert (named["resourceNames"], named["verbs"]) == (["holdfast-test"], ["get", "delete"])
    assert create["verbs"] == ["create"]
    selector = one(render(), "Service")["spec"]["selector"]
    for document in found:
        assert "hook-succeeded" in document["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
        assert not selector.items() <= document["metadata"]["labels"].items(), "it is no operator"


def test_the_test_runs_where_the_operator_watches() -> None:
    found = hooks(*NAMESPACED)
    assert {one(found, kind)["metadata"]["namespace"] for kind in ("Role", "RoleBinding")} == {"team-a"}
    assert {one(found, kind)["metadata"]["namespace"] for kind in ("Pod", "ServiceAccount")} == {"holdfast-system"}
    assert smoke_job(*NAMESPACED)["metadata"]["namespace"] == "team-a"


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
    def right(documents: list[dict[str, Any]]) -> list[str]:
        return [verb for _k, rule in rules(documents) if resource in rule["resources"] for verb in rule["verbs"]]

    assert right(render()) == ["get", "create", "patch"]
    assert environment(render())[variable] == "true"
    assert right(render(f"{value}.jobs=false")) == []
    assert environment(render(f"{value}.jobs=false"))[variable] == "false"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nodeRemediation.mode=Eat", "mode"),
        ("nodeRemediation.mode=Drain", "secretName"),
        ("nodeRemediation.maxUnavailable=101%", "maxUnavailable"),
        ("nodeRemediation.alerts[0].alert=Hot", "action"),
        ("nodeRemediation.cooldownSeconds=-1", "cooldownSeconds"),
        ("sidecr.image.tag=1", "sidecr"),
        ("image.tga=1", "additional properties"),
        ("sidecar.runAsUser=0", "runAsUser"),
        ("sidecar.resources.limit.cpu=1", "resources"),
        ("extraEnv[0].value=x", "extraEnv"),
        ("replicas=0", "replicas"),
        ("watchNamespaces={Team_A}", "watchNamespaces"),
        ("replica=2", "replica"),
        ("logLevel=LOUD", "logLevel"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("agents.url=http://holdfast", "agents"),
        ("service.clusterIP=not-an-address", "clusterIP"),
        ("networkPolicy.apiServerPorts[0]=0", "apiServerPorts"),
        ("monitoring.serviceMonitor.interval=soon", "interval"),
        ("monitoring.alerts=true", "monitoring"),
        ("monitoring.prometheusRule.runbooks=https://docs.example/", "runbooks"),
    ],
)
def test_a_wrong_value_is_refused_by_name(value: str, says: str) -> None:
    with pytest.raises(TestbedError, match=says):
        render(value)


def test_every_value_is_in_the_schema_and_every_schema_entry_is_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    groups = (
        "sidecar",
        "rbac",
        "agents",
        "service",
        "serviceAccount",
        "networkPolicy",
        "disruptionBudgets",
        "monitoring",
        "test",
    )
    for name in groups:
        assert set(values[name]) == set(schema["properties"][name]["properties"])


def test_the_notes_say_that_helm_does_not_upgrade_the_resource() -> None:
    assert "neither upgrades nor removes" in (CHART / "templates" / "NOTES.txt").read_text()
    assert "Helm does not upgrade" in (CHART / "README.md").read_text()


MONITORING = tuple(
    f"monitoring.{name}.enabled=true" for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
)


def test_nothing_of_monitoring_is_there_unless_asked_for() -> None:
    kinds = {document["kind"] for document in render()}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}


def test_the_service_monitor_finds_the_operators_metrics() -> None:
    documents = render(*MONITORING, "monitoring.serviceMonitor.labels.release=prom")
    monitor, service = one(documents, "ServiceMonitor"), one(documents, "Service")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["honorLabels"] is True, "the per-job gauges have their own label namespace"


def test_the_pod_monitor_finds_the_workers_of_every_namespace_and_says_whose_they_are(worker_pod: Any) -> None:
    spec = one(render(*MONITORING), "PodMonitor")["spec"]
    assert spec["namespaceSelector"] == {"any": True}
    assert spec["selector"]["matchLabels"].items() <= worker_pod["metadata"]["labels"].items()
    assert worker_pod["metadata"]["labels"]["holdfast.dev/job-name"] == "gpt"
    (endpoint,) = spec["podMetricsEndpoints"]
    (sidecar,) = worker_pod["spec"]["initContainers"]
    assert endpoint["port"] in {port["name"] for port in sidecar["ports"]}
    assert {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"} in endpoint["relabelings"]
    named = {"sourceLabels": ["__meta_kubernetes_pod_label_holdfast_dev_job_name"], "targetLabel": "job_name"}
    assert named in endpoint["relabelings"]
    (kept,) = endpoint["metricRelabelings"]
    assert (kept["action"], kept["regex"]) == ("keep", "holdfast_.*"), "a tenant's pod may have the same labels"
    rules = (CHART / "rules" / "holdfast.yaml").read_text()
    assert f'up{{container="{sidecar["name"]}"}}' in rules


@pytest.fixture
def worker_pod() -> dict[str, Any]:
    """A worker's pod as the operator makes it."""
    return worker_pod_on(Installation(sidecar_image="s", agents_url="https://o", ca_bundle="PEM"))


def worker_pod_on(platform: Installation) -> dict[str, Any]:
    job = parse_job(
        {
            "metadata": {"name": "gpt", "namespace": "ml", "uid": "u", "resourceVersion": "1", "generation": 1,
                         "creationTimestamp": "2026-01-31T12:00:00Z"},
            "spec": {"workers": {"replicas": 1, "template": {"spec": {"containers": [{"name": "t", "image": "i"}]}}}},
        }
    )  # fmt: skip
    assert job.spec is not None
    return pod(job, job.spec, Worker(incarnation=0, batch=0), platform)


def test_the_rules_are_those_of_the_file_with_the_runbooks_where_they_are_published() -> None:
    rules = one(render(*MONITORING, "monitoring.prometheusRule.runbooks=https://docs.example/r"), "PrometheusRule")
    text = (CHART / "rules" / "holdfast.yaml").read_text()
    assert one(render(*MONITORING), "PrometheusRule")["spec"] == yaml.safe_load(text)
    found = [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    urls = [rule["annotations"]["runbook_url"] for rule in found]
    assert urls
    assert all(re.fullmatch(r"https://docs\.example/r/Holdfast\w+", url) for url in urls)


def test_the_gpu_alerts_read_the_series_that_the_installer_names() -> None:
    selector = 'job="gpus",cluster="a"'
    values = ('monitoring.prometheusRule.gpuSelector=job="gpus"\\,cluster="a"',)
    text = json.dumps(one(render(*MONITORING, *values), "PrometheusRule")["spec"]).replace('\\"', '"')
    read = re.findall(r"DCGM_\w+(\{[^}]*\})?", text)
    assert set(read) == {f"{{{selector}}}"}


def test_the_dashboards_are_in_a_config_map_that_grafana_finds() -> None:
    folder = CHART / "dashboards"
    found = one(render(*MONITORING), "ConfigMap", "holdfast-dashboards")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["data"].keys() == {f"holdfast-{path.name}" for path in folder.iterdir()}
    for path in folder.iterdir():
        assert json.loads(found["data"][f"holdfast-{path.name}"]) == json.loads(path.read_text())
