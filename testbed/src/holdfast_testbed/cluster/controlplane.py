"""etcd, API server, controller manager and scheduler as daemons on the host."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.build.programs import program
from holdfast_testbed.cluster.kubeconfig import certificate_user, write_kubeconfig
from holdfast_testbed.cluster.state import State
from holdfast_testbed.node import processes
from holdfast_testbed.waiting import wait_for

PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")

# The requests of service accounts, so that a test can compare them with the granted permissions.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}

_USERS = {
    "admin": ("admin", ("system:masters",)),
    "kube-controller-manager": ("system:kube-controller-manager", ()),
    "kube-scheduler": ("system:kube-scheduler", ()),
    "kube-proxy": ("system:kube-proxy", ()),
}


@dataclass(frozen=True, kw_only=True)
class ControlPlane:
    """The control plane of one cluster."""

    state: State

    def prepare(self) -> None:
        """Write keys, certificates and kubeconfigs."""
        pki, plan = self.state.pki, self.state.plan
        pki.create()
        pki.create_signing_key("service-account")
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        addresses = {"127.0.0.1", plan.host_address, plan.first_service_address}
        pki.issue("apiserver", user="kube-apiserver", hosts=[*names, *sorted(addresses)])
        pki.issue("apiserver-kubelet-client", user="kube-apiserver-kubelet-client", groups=["system:masters"])
        for stem, (user, groups) in _USERS.items():
            self._kubeconfig(stem, user, groups)
        self.state.kubeconfig.symlink_to("pki/admin.kubeconfig")
        (pki.folder / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))

    def _kubeconfig(self, stem: str, user: str, groups: tuple[str, ...]) -> Path:
        certificate, key = self.state.pki.issue(stem, user=user, groups=groups)
        return write_kubeconfig(
            self.state.pki.folder / f"{stem}.kubeconfig",
            server=self.state.server,
            authority=self.state.pki.certificate_file,
            user=certificate_user(certificate, key),
        )

    @property
    def audit_log(self) -> Path:
        """The log of service accounts' requests, one JSON object per line."""
        return self.state.logs / "audit.log"

    def start(self) -> None:
        """Start all parts, and return when the API server answers."""
        self._run("etcd", self._etcd())
        self._run("kube-apiserver", self._apiserver())
        self.wait_for_api()
        self._run("kube-controller-manager", self._controller_manager())
        self._run("kube-scheduler", self._scheduler())

    def wait_for_api(self, seconds: float = 120.0) -> None:
        """Return when `/readyz` answers ok."""
        log = self.state.logs / "kube-apiserver.log"
        wait_for(self.ready, what="the API server is ready", seconds=seconds, explain=lambda: processes.tail(log))

    def ready(self) -> bool:
        """Return whether the API server answers `/readyz` with 200."""
        pki = self.state.pki
        context = ssl.create_default_context(cafile=str(pki.certificate_file))
        context.load_cert_chain(pki.folder / "admin.crt", pki.folder / "admin.key")
        server = http.client.HTTPSConnection(
            self.state.plan.host_address, self.state.ports.api, context=context, timeout=2
        )
        try:
            server.request("GET", "/readyz")
            return server.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            server.close()

    def identity(self, part: str) -> processes.Identity | None:
        return processes.read_record(self.state.records / part)

    def _run(self, name: str, options: dict[str, str]) -> None:
        argv = [str(program(name)), *(f"--{key}={value}" for key, value in options.items())]
        processes.start(name, argv, records=self.state.records, logs=self.state.logs)

    def _etcd(self) -> dict[str, str]:
        client = f"http://127.0.0.1:{self.state.ports.etcd}"
        peer = f"http://127.0.0.1:{self.state.ports.etcd_peer}"
        return {
            "name": "testbed",
            "data-dir": str(self.state.folder / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"testbed={peer}",
            "unsafe-no-fsync": "true",
            "log-level": "warn",
        }

    def _apiserver(self) -> dict[str, str]:
        pki, plan = self.state.pki.folder, self.state.plan
        return {
            "bind-address": plan.host_address,
            "advertise-address": plan.host_address,
            "secure-port": str(self.state.ports.api),
            "etcd-servers": f"http://127.0.0.1:{self.state.ports.etcd}",
            "endpoint-reconciler-type": "lease" if plan.nodes else "none",
            "service-cluster-ip-range": plan.service_network,
            "audit-policy-file": f"{pki}/audit-policy.json",
            "audit-log-path": str(self.audit_log),
            "audit-log-maxsize": "50",
            "audit-log-maxbackup": "1",
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "client-ca-file": f"{pki}/ca.crt",
            "tls-cert-file": f"{pki}/apiserver.crt",
            "tls-private-key-file": f"{pki}/apiserver.key",
            "kubelet-certificate-authority": f"{pki}/ca.crt",
            "kubelet-client-certificate": f"{pki}/apiserver-kubelet-client.crt",
            "kubelet-client-key": f"{pki}/apiserver-kubelet-client.key",
            "kubelet-preferred-address-types": "InternalIP",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": f"{pki}/service-account.pub",
            "service-account-signing-key-file": f"{pki}/service-account.key",
            "shutdown-delay-duration": "0s",
        }

    def _controller_manager(self) -> dict[str, str]:
        pki = self.state.pki.folder
        return {
            "kubeconfig": f"{pki}/kube-controller-manager.kubeconfig",
            "leader-elect": "false",
            "secure-port": "0",
            "use-service-account-credentials": "true",
            "root-ca-file": f"{pki}/ca.crt",
            "service-account-private-key-file": f"{pki}/service-account.key",
            "node-monitor-period": "2s",
            "node-monitor-grace-period": f"{self.state.node_monitor_grace_seconds}s",
            "kube-api-qps": "100",
            "kube-api-burst": "200",
        }

    def _scheduler(self) -> dict[str, str]:
        kubeconfig = f"{self.state.pki.folder}/kube-scheduler.kubeconfig"
        return {
            "kubeconfig": kubeconfig,
            "authentication-kubeconfig": kubeconfig,
            "authorization-kubeconfig": kubeconfig,
            "kube-api-qps": "500",
            "kube-api-burst": "1000",
            "leader-elect": "false",
            "secure-port": "0",
        }
