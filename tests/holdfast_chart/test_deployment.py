"""The operator's pods: replicas, security, images, settings, certificate."""

from __future__ import annotations

import json

import pytest
import yaml
from charted import (
    MONITORING,
    OPENSHIFT,
    all_of,
    container,
    environment,
    hooks,
    one,
    pod_of,
    sidecar_of,
)

from holdfast_operator.settings import from_environment
from holdfast_testbed.fakes.chart import CHART, render

pytestmark = pytest.mark.integration  # needs the Helm CLI

DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def test_two_operators_stand_on_two_nodes_where_they_can() -> None:
    spec = one(render(), "Deployment")["spec"]
    assert spec["replicas"] == 2
    (preferred,) = next(iter(spec["template"]["spec"]["affinity"]["podAntiAffinity"].values()))
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_an_affinity_of_ones_own_takes_the_place_of_ours() -> None:
    documents = render("affinity.nodeAffinity.x=y", "replicaCount=1")
    assert one(documents, "Deployment")["spec"]["replicas"] == 1
    assert pod_of(documents)["affinity"] == {"nodeAffinity": {"x": "y"}}


def test_a_drain_never_takes_all_replicas_at_once() -> None:
    documents = render()
    budget = one(documents, "PodDisruptionBudget")["spec"]
    labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    alone = render("affinity.nodeAffinity.x=y", "replicaCount=1")
    assert not all_of(alone, "PodDisruptionBudget"), "no node could be drained"


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
    pod = pod_of(documents)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = container(documents)["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {next(iter(set(volume) - {"name"})) for volume in pod["volumes"]} == {"emptyDir"}


@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_what_reviewers_of_manifests_ask_for(kind: str) -> None:
    """The rules of kube-score that matter, for the operator and the pod of `helm test`."""
    documents = [*render(), *hooks()]
    spec = pod_of(documents) if kind == "Deployment" else one(documents, "Pod")["spec"]
    (only,) = spec["containers"]
    resources = only["resources"]
    assert set(resources["requests"]) == {"cpu", "memory", "ephemeral-storage"}
    assert set(resources["limits"]) == {"memory", "ephemeral-storage"}, "a CPU limit would throttle"
    assert only["imagePullPolicy"] in ("IfNotPresent", "Always")
    assert not only["image"].endswith(":latest")
    assert spec["securityContext"]["runAsUser"] > 10_000
    assert spec["securityContext"]["runAsNonRoot"] is True
    context = only["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert (context["allowPrivilegeEscalation"], context.get("privileged", False)) == (False, False)
    if kind == "Deployment":
        probes = [only[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness", "startup")]
        assert [probe["path"] for probe in probes] == ["/healthz", "/readyz", "/healthz"]
        labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
        policies = [d["spec"] for d in all_of(documents, "NetworkPolicy")]
        for spec in (*policies, one(documents, "PodDisruptionBudget")["spec"]):
            selector = spec.get("podSelector") or spec["selector"]
            assert selector["matchLabels"].items() <= labels.items()
        assert one(documents, "Service")["spec"]["selector"].items() <= labels.items()


def test_openshift_chooses_the_users() -> None:
    """Its restricted-v2 refuses a fixed user, in the operator's pod, the test's and every worker's sidecar."""
    documents = render(*OPENSHIFT)
    rendered = json.dumps([d for d in documents if d["kind"] != "CustomResourceDefinition"])
    assert "runAsUser" not in rendered
    assert pod_of(documents)["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert "runAsUser" not in json.dumps(hooks(*OPENSHIFT))
    sidecar = sidecar_of(documents)["securityContext"]
    assert "runAsUser" not in sidecar
    assert sidecar["runAsNonRoot"] is True


def test_the_sidecar_has_a_user_of_its_own_by_default() -> None:
    assert sidecar_of(render())["securityContext"]["runAsUser"] == 65532


def test_a_quota_on_cpu_limits_is_met_by_a_value() -> None:
    resources = sidecar_of(render("sidecar.resources.limits.cpu=100m"))["resources"]
    assert resources == {"requests": {"cpu": "10m", "memory": "48Mi"}, "limits": {"memory": "96Mi", "cpu": "100m"}}


def test_a_proxy_a_private_ca_labels_and_spread_are_values() -> None:
    documents = render(
        "extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=http://proxy:3128",
        "extraVolumes[0].name=ca,extraVolumes[0].configMap.name=ca",
        "extraVolumeMounts[0].name=ca,extraVolumeMounts[0].mountPath=/ca",
        "commonLabels.team=ml",
        "topologySpreadConstraints[0].topologyKey=zone",
        "podAnnotations.note=x",
    )
    assert environment(documents)["HTTPS_PROXY"] == "http://proxy:3128"
    pod = pod_of(documents)
    assert {"name": "ca", "configMap": {"name": "ca"}} in pod["volumes"]
    assert {"name": "ca", "mountPath": "/ca"} in container(documents)["volumeMounts"]
    assert pod["topologySpreadConstraints"] == [{"topologyKey": "zone"}]
    assert {document["metadata"]["labels"]["team"] for document in documents} == {"ml"}
    annotations = one(documents, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "8080",
        "prometheus.io/path": "/metrics",
        "note": "x",
    }


def test_a_service_monitor_takes_the_place_of_the_scrape_annotations() -> None:
    template = one(render(*MONITORING), "Deployment")["spec"]["template"]
    assert "annotations" not in template["metadata"], "each sample would exist twice"


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


def test_a_certificate_of_ones_own_is_mounted_and_the_built_in_ca_is_not_readable() -> None:
    documents = render("tls.existingSecret=holdfast-tls")
    settings = from_environment(environment(documents) | {"HOLDFAST_NAMESPACE": "x"})
    mounts = {mount["mountPath"]: mount["name"] for mount in container(documents)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_of(documents)["volumes"]}
    assert volumes[mounts[str(settings.tls_folder)]]["secret"]["secretName"] == "holdfast-tls"
    assert "holdfast-ca" not in json.dumps(one(documents, "Role", "holdfast"))
    assert from_environment(environment(render()) | {"HOLDFAST_NAMESPACE": "x"}).tls_folder is None


def test_the_certificate_in_the_documentation_names_the_host_of_the_url() -> None:
    page = (CHART.parents[1] / "docs" / "how-to" / "security.md").read_text()
    blocks = [yaml.safe_load(block.partition("```")[0]) for block in page.split("```yaml\n")[1:]]
    (issued,) = (block for block in blocks if block.get("kind") == "Certificate")
    (values,) = (block for block in blocks if "tls" in block)
    settings = from_environment(environment(render()) | {"HOLDFAST_NAMESPACE": "x"})
    assert settings.agents_host in issued["spec"]["dnsNames"]
    assert values["tls"]["existingSecret"] == issued["spec"]["secretName"]


def images(*values: str) -> list[str]:
    """The operator's, the sidecar's and the image of the test's job."""
    documents = render(*values, hooks=True)
    (test,) = one(documents, "Pod")["spec"]["containers"]
    (trainer,) = json.loads(test["command"][3])["spec"]["workers"]["template"]["spec"]["containers"]
    assert test["image"] == container(documents)["image"]
    return [test["image"], environment(documents)["HOLDFAST_SIDECAR_IMAGE"], trainer["image"]]


def test_images_have_the_charts_version_unless_told_otherwise() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    names = ("operator", "sidecar", "trainer")
    assert images() == [f"docker.io/holdfast/{name}:{version}" for name in names]
    assert images(
        "image.tag=1.2.3",
        "sidecar.image.registry=r.example:5000",
        "sidecar.image.repository=s",
        "sidecar.image.tag=v4",
        f"test.image.digest={DIGEST}",
    ) == ["docker.io/holdfast/operator:1.2.3", "r.example:5000/s:v4", f"docker.io/holdfast/trainer@{DIGEST}"]


def test_one_value_moves_all_images_to_a_mirror() -> None:
    found = images("global.imageRegistry=mirror.example:5000/hub", f"image.digest={DIGEST}", "image.tag=unused")
    assert found == [
        f"mirror.example:5000/hub/holdfast/operator@{DIGEST}",
        "mirror.example:5000/hub/holdfast/sidecar:dev",
        "mirror.example:5000/hub/holdfast/trainer:dev",
    ]
