"""Clouds that can terminate a machine and start another. ``replace`` may be called again at any time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from holdfast_operator.errors import CloudError, SettingsError
from holdfast_operator.remediation.settings import RemediationSettings


class Cloud(Protocol):
    """All operations on a cloud."""

    def replace(self, provider_id: str) -> str:
        """Terminate this machine, so that another one starts.

        Return a description of the result. Raises ``CloudError``.
        """


class NoCloud:
    """The cloud without a provider: every call is refused."""

    def replace(self, provider_id: str) -> str:
        raise CloudError(f"no provider is set that could replace {provider_id or 'a machine without providerID'}")


_PROVIDER_ID = re.compile(r"^aws:///([a-z]{2}(?:-[a-z]+)+-\d+)[a-z0-9-]*/(i-[0-9a-f]{8,17})$")
_ENDED = frozenset({"shutting-down", "terminated"})


class Aws:
    """EC2 and its Auto Scaling groups. ``client(service, region)`` makes boto3's clients."""

    def __init__(self, client: Callable[[str, str], Any], *, outside_groups: bool) -> None:
        self._client = client
        self._outside_groups = outside_groups

    def replace(self, provider_id: str) -> str:
        """Terminate the instance; its group starts another."""
        match = _PROVIDER_ID.match(provider_id)
        if match is None:
            raise CloudError(f"the node's providerID is not of EC2: {provider_id!r}")
        region, instance = match[1], match[2]
        try:
            return self._replace(region, instance)
        except Exception as error:
            if not _of_boto(error):
                raise
            raise CloudError(f"EC2 did not take instance {instance} away: {error}{_advice(error)}") from error

    def _replace(self, region: str, instance: str) -> str:
        if self._state(region, instance) in _ENDED:
            return f"instance {instance} is being terminated already"
        scaling = self._client("autoscaling", region)
        listed = scaling.describe_auto_scaling_instances(InstanceIds=[instance])["AutoScalingInstances"]
        if listed:
            group = listed[0]["AutoScalingGroupName"]
            if not str(listed[0].get("LifecycleState", "")).startswith("Terminat"):
                # The desired capacity stays, so the group starts another instance at once.
                scaling.terminate_instance_in_auto_scaling_group(
                    InstanceId=instance, ShouldDecrementDesiredCapacity=False
                )
            return f"instance {instance} is terminated, group {group} starts another"
        if not self._outside_groups:
            raise CloudError(
                f"instance {instance} is in no Auto Scaling group, so nothing would start another: replace it by"
                " hand, or set nodeRemediation.terminateOutsideGroups"
            )
        self._client("ec2", region).terminate_instances(InstanceIds=[instance])
        return f"instance {instance} is terminated; it was in no Auto Scaling group"

    def _state(self, region: str, instance: str) -> str:
        ec2 = self._client("ec2", region)
        for page in ec2.describe_instances(Filters=[{"Name": "instance-id", "Values": [instance]}])["Reservations"]:
            for found in page["Instances"]:
                return str(found["State"]["Name"])
        return "terminated"


def _advice(error: Exception) -> str:
    """Return advice on the setting that may be the reason; empty if there is none."""
    if type(error).__name__ not in ("NoCredentialsError", "CredentialRetrievalError"):
        return ""
    return (
        ": bind a role to the operator's ServiceAccount, and allow its pod to reach 169.254.170.23 and "
        "169.254.169.254 at port 80, as the chart's NetworkPolicy does with nodeRemediation.provider AWS"
    )


def _of_boto(error: Exception) -> bool:
    """Return whether boto3 or botocore raised this; each has its own exception tree."""
    return type(error).__module__.partition(".")[0] in ("boto3", "botocore")


def cloud_of(rules: RemediationSettings) -> Cloud:
    """Return the configured cloud. Raises ``SettingsError`` if its library is not in the image."""
    if not rules.provider:
        return NoCloud()
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise SettingsError(
            "nodeRemediation.provider is AWS and boto3 is not installed: pip install 'holdfast-operator[aws]'"
        ) from None
    config = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 3, "mode": "standard"})
    session = boto3.session.Session()

    def client(service: str, region: str) -> Any:
        return session.client(service, region_name=region, config=config)

    return Aws(client, outside_groups=rules.outside_groups)
