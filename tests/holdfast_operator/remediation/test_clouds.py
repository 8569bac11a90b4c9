"""EC2 and Auto Scaling, played by moto: an instance goes and its group brings another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import boto3
import pytest
from botocore.exceptions import NoCredentialsError
from moto import mock_aws

from holdfast_operator.api.node_mark import Mode
from holdfast_operator.errors import CloudError, SettingsError
from holdfast_operator.remediation.clouds import Aws, NoCloud, cloud_of
from holdfast_operator.remediation.settings import RemediationSettings, parse_rules

REGION = "us-east-1"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of this machine's own account is ever used."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with mock_aws():
        yield


@cache
def client(service: str, region: str = REGION) -> Any:
    """Made once: to read what a service can do takes a second. What it talks to begins anew in each test."""
    return boto3.client(service, region_name=region)


def aws(**options: Any) -> Aws:
    return Aws(client, **{"outside_groups": False, **options})


@cache
def image() -> str:
    """One of the thousands that moto has in each test."""
    return str(client("ec2").describe_images()["Images"][0]["ImageId"])


@pytest.fixture
def group() -> list[str]:
    """Instances of a group of two."""
    scaling = client("autoscaling")
    scaling.create_launch_configuration(LaunchConfigurationName="gpu", ImageId=image(), InstanceType="p4d.24xlarge")
    scaling.create_auto_scaling_group(
        AutoScalingGroupName="gpu",
        LaunchConfigurationName="gpu",
        MinSize=2,
        MaxSize=2,
        AvailabilityZones=["us-east-1a"],
    )
    return members()


def members() -> list[str]:
    (found,) = client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=["gpu"])["AutoScalingGroups"]
    return sorted(instance["InstanceId"] for instance in found["Instances"])


def state(instance: str) -> str:
    found = client("ec2").describe_instances(InstanceIds=[instance])
    return str(found["Reservations"][0]["Instances"][0]["State"]["Name"])


def provider_id(instance: str, zone: str = "us-east-1a") -> str:
    return f"aws:///{zone}/{instance}"


def test_instance_of_a_group_is_terminated(group: list[str]) -> None:
    """The group starts another one."""
    sick, well = group
    told = aws().replace(provider_id(sick))
    assert "group gpu starts another" in told
    assert state(sick) in ("shutting-down", "terminated")
    assert state(well) == "running"
    after = members()
    assert len(after) == 2, "the group's size stays"
    assert sick not in after


def test_to_be_told_twice_ends_one_instance(group: list[str]) -> None:
    sick = group[0]
    aws().replace(provider_id(sick))
    after = members()
    assert "already" in aws().replace(provider_id(sick))
    assert members() == after


@pytest.fixture
def lonely() -> str:
    """An instance that no group would replace."""
    made = client("ec2").run_instances(ImageId=image(), MinCount=1, MaxCount=1)
    return str(made["Instances"][0]["InstanceId"])


def test_an_instance_without_a_group_is_kept_unless_asked_for(lonely: str) -> None:
    with pytest.raises(CloudError, match="no Auto Scaling group"):
        aws().replace(provider_id(lonely))
    assert state(lonely) == "running"
    aws(outside_groups=True).replace(provider_id(lonely))
    assert state(lonely) in ("shutting-down", "terminated")


def test_an_instance_that_is_unknown_is_gone() -> None:
    assert "already" in aws().replace(provider_id("i-0123456789abcdef0"))


@pytest.mark.parametrize(
    "odd", ["", "gce://project/zone/name", "aws:///us-east-1a/", "aws:///us-east-1a/i-0123456789abcdef0/../x"]
)
def test_a_machine_that_is_none_of_ec2_is_refused_by_name(odd: str) -> None:
    with pytest.raises(CloudError, match="providerID"):
        aws().replace(odd)


@pytest.mark.parametrize(
    ("zone", "region"),
    [("us-east-1a", "us-east-1"), ("us-gov-west-1b", "us-gov-west-1"), ("us-west-2-lax-1a", "us-west-2")],
)
def test_the_region_is_the_zones(zone: str, region: str) -> None:
    asked = []

    def spying(service: str, where: str) -> Any:
        asked.append(where)
        return client(service, where)

    Aws(spying, outside_groups=False).replace(provider_id("i-0123456789abcdef0", zone))
    assert set(asked) == {region}


def test_what_aws_answers_stands_in_the_error(lonely: str) -> None:
    client("ec2").modify_instance_attribute(InstanceId=lonely, DisableApiTermination={"Value": True})
    with pytest.raises(CloudError, match="disableApiTermination"):
        aws(outside_groups=True).replace(provider_id(lonely))


def test_missing_credentials_name_the_network_policy(lonely: str) -> None:
    def unreachable(_service: str, _region: str) -> Any:
        raise NoCredentialsError

    with pytest.raises(CloudError, match=r"Unable to locate credentials: .*169\.254\.170\.23 .*NetworkPolicy"):
        Aws(unreachable, outside_groups=False).replace(provider_id(lonely))


def test_a_fault_of_ours_is_not_taken_for_aws() -> None:
    def broken(_service: str, _region: str) -> Any:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        Aws(broken, outside_groups=False).replace(provider_id("i-0123456789abcdef0"))


def test_without_a_provider_nothing_is_replaced() -> None:
    assert isinstance(cloud_of(RemediationSettings()), NoCloud)
    with pytest.raises(CloudError, match="no provider"):
        NoCloud().replace(provider_id("i-0123456789abcdef0"))


def test_the_real_cloud_is_made_of_boto3_and_asks_the_group(group: list[str]) -> None:
    cloud = cloud_of(RemediationSettings(mode=Mode.REPLACE, provider="AWS"))
    assert "group gpu" in cloud.replace(provider_id(group[0]))


# Helm's values


def test_nothing_set_only_observes() -> None:
    made = parse_rules("")
    assert (made.mode, made.dry_run, made.alerts, made.token_file) == (Mode.OBSERVE, False, (), "")


def test_every_value_is_read() -> None:
    made = parse_rules(
        '{"mode":"Replace","provider":"AWS","alerts":[{"alert":"Xid","labels":{"xid":"79"},"action":"Drain"}],'
        '"maxUnavailable":"30%","maxPerHour":4,"releaseAfterSeconds":0,"force":true,"nodeSelector":{"pool":"gpu"},'
        '"cooldownSeconds":3600.0,"terminateOutsideGroups":true,"nodeLabels":["host"],"dryRun":true}',
        "/token",
    )
    assert made.mode is Mode.REPLACE
    assert made.action({"alertname": "Xid", "xid": "79"}) == (made.alerts[0], Mode.DRAIN)
    assert made.action({"alertname": "Xid", "xid": "13"}) is None
    assert [made.max_unavailable.of(nodes) for nodes in (0, 1, 10, 11)] == [0, 1, 3, 4]
    assert (made.max_per_hour, made.release_after, made.force, made.dry_run) == (4, None, True, True)
    assert (made.node_selector, made.node_labels, made.token_file) == ({"pool": "gpu"}, ("host",), "/token")
    assert made.outside_groups


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"mode":"Eat"}', "mode"),
        ('{"mode":"Replace"}', "provider"),
        ('{"provider":"Moon"}', "provider"),
        ('{"alerts":[{"action":"Drain"}]}', "alerts"),
        ('{"alerts":[{"alert":"A","action":"drain"}]}', "action"),
        ('{"maxUnavailable":"-1"}', "maxUnavailable"),
        ('{"maxUnavailable":"101%"}', "maxUnavailable"),
        ('{"maxPerHour":1.5}', "maxPerHour"),
        ('{"cooldownSeconds":-1}', "cooldownSeconds"),
    ],
)
def test_a_wrong_value_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        parse_rules(text)
