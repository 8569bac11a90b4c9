"""The settings of this installation that manifests depend on."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_operator.api import names as c


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The settings of this installation, the same for all jobs."""

    sidecar_image: str
    agents_url: str
    ca_bundle: str
    sidecar_pull_policy: str = "IfNotPresent"
    sidecar_user: int | None = c.SIDECAR_UID
    """None: the platform chooses one."""
    sidecar_resources: str = c.SIDECAR_RESOURCES
    """JSON."""
    metadata_url: str = ""
    dcgm_url: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    network_policies: bool = True
    disruption_budgets: bool = True
