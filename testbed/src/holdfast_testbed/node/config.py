"""The configuration files of a node's programs, as pure functions of the plan."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_testbed.cluster.addressing import NodePlan
from holdfast_testbed.constants import PAUSE_IMAGE, POD_BRIDGE, RUNTIME_MOUNT

SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Files that the kubelet requires. A node gets its own, so that the host's stay unchanged."""

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"


@dataclass(frozen=True, kw_only=True)
class NodeFiles:
    """The files of a node's configuration."""

    folder: Path

    @property
    def cni(self) -> Path:
        """The folder of CNI configurations."""
        return self.folder / "cni"

    @property
    def containerd(self) -> Path:
        """containerd's configuration."""
        return self.folder / "containerd.toml"

    @property
    def containers(self) -> Path:
        """The base runtime specification of every container."""
        return self.folder / "containers.json"

    @property
    def kubelet(self) -> Path:
        """The kubelet's configuration."""
        return self.folder / "kubelet.json"

    @property
    def kube_proxy(self) -> Path:
        """kube-proxy's configuration."""
        return self.folder / "kube-proxy.json"

    @property
    def boot(self) -> Path:
        """The file with the tasks of the node's first process."""
        return self.folder / "boot.json"

    @property
    def announcement(self) -> Path:
        """The file with the cloud's announcement for this node."""
        return self.folder / "announcement.json"


def containerd_toml(
    *, root: Path, cni_bin: Path, cni_conf: Path, runc: Path, containers: Path, may_raise_oom_score: bool
) -> str:
    """Return containerd's configuration. Without CAP_SYS_RESOURCE, an OOM score must not be lowered."""
    return f"""version = 3
root = {_quoted(root)}
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing"]

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = {str(not may_raise_oom_score).lower()}
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = [{_quoted(cni_bin)}]
    conf_dir = {_quoted(cni_conf)}
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = {_quoted(containers)}
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = {_quoted(runc)}
        SystemdCgroup = false
"""


def container_spec(default: str, *, runtime: Path) -> str:
    """Return containerd's default runtime specification with the host's runtime mounted in every container."""
    spec = json.loads(default)
    mount = {"destination": RUNTIME_MOUNT, "type": "bind", "source": str(runtime), "options": ["rbind", "ro"]}
    spec["mounts"].append(mount)
    return json.dumps(spec, indent=2)


def _quoted(path: Path) -> str:
    return json.dumps(str(path))


def cni_conflist(node: NodePlan) -> str:
    """Return the configuration of a bridge on each node. The node's routes lead to pods on other nodes."""
    bridge = {
        "type": "bridge",
        "bridge": POD_BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": node.pod_network}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": "/run/cni",
        },
    }
    return json.dumps({"cniVersion": "1.0.0", "name": "testbed", "plugins": [bridge]}, indent=2)


def kubelet_config(*, node: NodePlan, cgroup: str, authority: Path, certificate: Path, key: Path) -> str:
    """Return the kubelet's configuration."""
    document: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(certificate),
        "tlsPrivateKeyFile": str(key),
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "protectKernelDefaults": True,
        "makeIPTablesUtilChains": False,
        # Without DNS: nothing listens on a pod's loopback, so a look-up is refused at once instead of timing out.
        "clusterDNS": ["127.0.0.1"],
        "clusterDomain": "cluster.local",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "nodeLeaseDurationSeconds": 20,
        "serializeImagePulls": False,
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "podLogsDir": "/var/log/pods",
        "providerID": f"aws:///testbed-1a/{instance_id(node)}",
    }
    return json.dumps(document, indent=2)


def kube_proxy_config(*, node: NodePlan, kubeconfig: Path) -> str:
    """Return kube-proxy's configuration. Conntrack's limits belong to the host and stay unchanged."""
    document: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": node.name,
        "bindAddress": node.address,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    return json.dumps(document, indent=2)


def instance_id(node: NodePlan) -> str:
    """Return the instance ID that the node's metadata service reports."""
    return f"i-{hashlib.sha256(node.namespace.encode()).hexdigest()[:17]}"
