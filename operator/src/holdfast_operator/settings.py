"""The operator's own settings. Only ``from_environment`` reads the environment."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast_operator.api import names as c
from holdfast_operator.api.timings import DEFAULT_TIMINGS, Timings
from holdfast_operator.errors import SettingsError
from holdfast_operator.remediation.settings import RemediationSettings, parse_rules

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one operator process."""

    sidecar_image: str
    namespace: str
    agents_url: str
    agents_names: tuple[str, ...]
    tls_folder: Path | None = None  # folder of a mounted certificate; without one, the built-in CA signs
    watch_namespaces: tuple[str, ...] = ()
    agents_port: int = c.PORT_AGENTS
    http_port: int = c.PORT_HTTP
    host: str = ""
    log_level: str = "INFO"
    sidecar_pull_policy: str = "IfNotPresent"
    sidecar_user: int | None = c.SIDECAR_UID
    sidecar_resources: str = c.SIDECAR_RESOURCES
    image_pull_secrets: tuple[str, ...] = ()
    network_policies: bool = True
    disruption_budgets: bool = True
    metadata_url: str = ""
    dcgm_url: str = c.DCGM_URL
    identity: str = ""
    own_url: str = ""
    lease_seconds: int = c.LEASE_SECONDS
    workers: int = 8
    relist_seconds: float = 180.0
    memory_bytes: int | None = None  # the container's limit
    kubeconfig: str = ""
    remediation: RemediationSettings = field(default_factory=RemediationSettings)
    timings: Timings = DEFAULT_TIMINGS  # only tests change them

    @property
    def agents_host(self) -> str:
        """The name by which sidecars verify the operator."""
        return _host_of(self.agents_url)


def from_environment(environment: Mapping[str, str] | None = None) -> Settings:
    env = os.environ if environment is None else environment
    namespace = env.get("HOLDFAST_NAMESPACE") or _own_namespace()
    service = env.get("HOLDFAST_SERVICE", "holdfast-operator")
    port = _integer(env, "HOLDFAST_AGENTS_PORT", c.PORT_AGENTS)
    host = f"{service}.{namespace}.svc"
    url = env.get("HOLDFAST_AGENTS_URL") or f"https://{host}:{port}"
    names = [host, f"{service}.{namespace}.svc.cluster.local", f"{service}.{namespace}", service, _host_of(url)]
    address = env.get("HOLDFAST_POD_IP", "")
    return Settings(
        sidecar_image=_needed(env, "HOLDFAST_SIDECAR_IMAGE"),
        namespace=namespace,
        agents_url=url,
        agents_names=tuple(dict.fromkeys([*names, *filter(None, [address]), *_words(env, "HOLDFAST_AGENTS_NAMES")])),
        tls_folder=Path(env["HOLDFAST_TLS_FOLDER"]) if env.get("HOLDFAST_TLS_FOLDER") else None,
        watch_namespaces=_words(env, "HOLDFAST_WATCH_NAMESPACES"),
        agents_port=port,
        http_port=_integer(env, "HOLDFAST_HTTP_PORT", c.PORT_HTTP),
        host=env.get("HOLDFAST_HOST", ""),
        log_level=env.get("HOLDFAST_LOG_LEVEL", "INFO").upper(),
        sidecar_pull_policy=env.get("HOLDFAST_SIDECAR_PULL_POLICY", "IfNotPresent"),
        sidecar_user=_user(env, "HOLDFAST_SIDECAR_RUN_AS_USER"),
        sidecar_resources=_object(env, "HOLDFAST_SIDECAR_RESOURCES", c.SIDECAR_RESOURCES),
        image_pull_secrets=_words(env, "HOLDFAST_IMAGE_PULL_SECRETS"),
        network_policies=_boolean(env, "HOLDFAST_NETWORK_POLICIES", default=True),
        disruption_budgets=_boolean(env, "HOLDFAST_DISRUPTION_BUDGETS", default=True),
        metadata_url=env.get("HOLDFAST_METADATA_URL", ""),
        dcgm_url=env.get("HOLDFAST_DCGM_URL", c.DCGM_URL),
        # The name of a pod belongs to one process; a host may have several.
        identity=env.get("HOLDFAST_POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        own_url=f"https://{_in_url(address)}:{port}" if address else "",
        lease_seconds=_integer(env, "HOLDFAST_LEASE_SECONDS", c.LEASE_SECONDS),
        workers=_integer(env, "HOLDFAST_WORKERS", 8),
        memory_bytes=_integer(env, "HOLDFAST_MEMORY_BYTES", 0) or None,
        relist_seconds=float(_integer(env, "HOLDFAST_RELIST_SECONDS", 180)),
        kubeconfig=env.get("KUBECONFIG", ""),
        remediation=parse_rules(env.get("HOLDFAST_NODE_REMEDIATION", ""), env.get("HOLDFAST_ALERTS_TOKEN_FILE", "")),
    )


def _own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        raise SettingsError("HOLDFAST_NAMESPACE is not set, and this is no pod: set it") from None


def _needed(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise SettingsError(f"{name} is not set")
    return value


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name) or str(default)
    if not value.isdigit():
        raise SettingsError(f"{name} must be an integer, not {value!r}")
    return int(value)


def _user(env: Mapping[str, str], name: str) -> int | None:
    """Return the user ID; None if the variable is set and empty."""
    value = env.get(name, str(c.SIDECAR_UID))
    if not value:
        return None
    if not value.isdigit() or int(value) == 0:
        raise SettingsError(f"invalid value {value!r} for {name}: expected a user ID above 0, or nothing")
    return int(value)


def _object(env: Mapping[str, str], name: str, default: str) -> str:
    """Return a JSON object, as text."""
    value = env.get(name) or default
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise SettingsError(f"invalid value {value!r} for {name}: expected a JSON object")
    return value


def _boolean(env: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = env.get(name) or str(default).lower()
    if value not in ("true", "false"):
        raise SettingsError(f"{name} must be true or false, not {value!r}")
    return value == "true"


def _words(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(word for word in env.get(name, "").replace(",", " ").split() if word)


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _host_of(url: str) -> str:
    host = url.partition("://")[2].partition("/")[0]
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host
