"""The environment becomes settings, or a sentence that names what is wrong."""

from pathlib import Path

import pytest

from holdfast_sidecar import interruptions
from holdfast_sidecar.errors import SettingsError
from holdfast_sidecar.interruptions.aws import AwsSource
from holdfast_sidecar.interruptions.azure import AzureSource
from holdfast_sidecar.interruptions.gcp import GcpSource
from holdfast_sidecar.settings import read_environment

NEEDED = {
    "HOLDFAST_POD_NAMESPACE": "ml",
    "HOLDFAST_POD_NAME": "gpt-w0",
    "HOLDFAST_POD_UID": "uid-w0",
    "HOLDFAST_OPERATOR_URL": "https://operator.holdfast-system.svc:8443/",
}


def test_defaults_are_the_protocols():
    settings = read_environment(NEEDED)
    assert settings.run_dir == Path("/var/run/holdfast")
    assert settings.token_file == Path("/var/run/secrets/holdfast/token")
    assert settings.ca_file == Path("/var/run/secrets/holdfast/ca.crt")
    assert settings.operator_url == "https://operator.holdfast-system.svc:8443"
    assert (settings.port, settings.checkpoint_deadline_seconds) == (9464, 25.0)
    assert settings.metadata_url == "http://169.254.169.254"
    assert interruptions.build(settings, lambda: 0.0, lambda _: False) == []


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_what_is_missing_is_named(name: str):
    with pytest.raises(SettingsError, match=f"{name} is not set"):
        read_environment({**NEEDED, name: " "})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOLDFAST_OPERATOR_URL", "http://operator:8443"),
        ("HOLDFAST_OPERATOR_URL", "https://"),
        ("HOLDFAST_OPERATOR_URL", "https://operator:port"),
        ("HOLDFAST_METADATA_URL", "ftp://169.254.169.254"),
        ("HOLDFAST_SIDECAR_PORT", "seventy"),
        ("HOLDFAST_SIDECAR_PORT", "65536"),
        ("HOLDFAST_SIDECAR_PORT", "nan"),
        ("HOLDFAST_CHECKPOINT_DEADLINE_SECONDS", "0"),
        ("HOLDFAST_CHECKPOINT_DEADLINE_SECONDS", "nan"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: str):
    with pytest.raises(SettingsError, match=name):
        read_environment({**NEEDED, name: value})


@pytest.mark.parametrize(("exporter", "waits"), [("", False), ("http://10.0.0.1:9400/metrics", True)])
def test_a_pod_with_gpus_has_an_hours_notice_of_gcp(sky, clock, exporter: str, waits: bool):
    here = {"HOLDFAST_NOTICE_PROVIDERS": "GCP", "HOLDFAST_METADATA_URL": sky.url, "HOLDFAST_DCGM_URL": exporter}
    (source,) = interruptions.build(read_environment({**NEEDED, **here}), lambda: 0.0, lambda _: False)
    source.poll(clock.now())
    sky.announce("GCP", "TERMINATE_ON_HOST_MAINTENANCE")
    assert (source.poll(clock.now()) == ()) is waits


@pytest.mark.parametrize(
    ("told", "node", "asked"),
    [
        ("http://10.0.0.7:9400/metrics", "10.0.0.7", "http://10.0.0.7:9400/metrics"),
        ("http://2600:1f18::5:9400/metrics", "2600:1f18::5", "http://[2600:1f18::5]:9400/metrics"),
        ("http://fd00::5", "fd00::5", "http://[fd00::5]/metrics"),
        ("http://[fd00::5]:9400/metrics", "fd00::5", "http://[fd00::5]:9400/metrics"),
        ("http://fd00::51:9400/metrics", "fd00::5", ""),
        ("http://exporter.gpu:9400", "fd00::5", "http://exporter.gpu:9400/metrics"),
    ],
)
def test_a_nodes_address_of_ipv6_is_put_in_brackets(told: str, node: str, asked: str):
    settings = read_environment({**NEEDED, "HOLDFAST_HOST_IP": node, "HOLDFAST_DCGM_URL": told})
    assert settings.dcgm_url == asked


@pytest.mark.parametrize("address", ["10.0.0.1:9400", "https://10.0.0.1:9400", "http://10.0.0.1:port", "http://"])
def test_invalid_exporter_address_skips_gpus(caplog, address: str):
    """Training is not affected."""
    settings = read_environment({**NEEDED, "HOLDFAST_DCGM_URL": address})
    assert settings.dcgm_url == ""
    assert "HOLDFAST_DCGM_URL must be an http:// address" in caplog.text
    assert "GPUs are not watched" in caplog.text


def test_a_provider_that_is_not_known_is_left_out_and_said(caplog):
    settings = read_environment({**NEEDED, "HOLDFAST_NOTICE_PROVIDERS": "AWS, Moon,AWS,Azure, GCP"})
    built = interruptions.build(settings, lambda: 0.0, lambda _: False)
    assert [type(source) for source in built] == [AwsSource, AzureSource, GcpSource]
    assert [source.name for source in built] == ["AWS", "Azure", "GCP"]
    assert "Moon is no source of notices" in caplog.text
