"""The environment, read in one place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast_operator import main
from holdfast_operator.errors import SettingsError
from holdfast_operator.settings import from_environment

LEAST = {"HOLDFAST_SIDECAR_IMAGE": "holdfast/sidecar:1", "HOLDFAST_NAMESPACE": "holdfast-system"}


def test_the_least_gives_the_services_own_address() -> None:
    settings = from_environment(LEAST)
    assert settings.agents_url == "https://holdfast-operator.holdfast-system.svc:8443"
    assert "holdfast-operator.holdfast-system.svc" in settings.agents_names
    assert settings.watch_namespaces == ()


def test_certificate_names_the_replicas_own_address() -> None:
    for address, url in (("10.0.0.9", "https://10.0.0.9:8443"), ("fd00::9", "https://[fd00::9]:8443")):
        settings = from_environment({**LEAST, "HOLDFAST_POD_IP": address})
        assert settings.own_url == url
        assert address in settings.agents_names
    assert from_environment(LEAST).own_url == ""


def test_two_processes_of_one_host_are_two_candidates() -> None:
    assert from_environment(LEAST).identity.endswith(f"-{os.getpid()}")
    assert from_environment({**LEAST, "HOLDFAST_POD_NAME": "holdfast-x"}).identity == "holdfast-x"


def test_the_certificate_names_the_host_of_the_url() -> None:
    for url, host in (("https://10.0.0.200:8443", "10.0.0.200"), ("https://[fd00::1]:8443/x", "fd00::1")):
        assert host in from_environment({**LEAST, "HOLDFAST_AGENTS_URL": url}).agents_names


def test_mounted_certificate_is_verified_by_the_urls_host() -> None:
    assert from_environment(LEAST).tls_folder is None
    settings = from_environment(
        {**LEAST, "HOLDFAST_TLS_FOLDER": "/tls", "HOLDFAST_AGENTS_URL": "https://holdfast.example:443"}
    )
    assert (settings.tls_folder, settings.agents_host) == (Path("/tls"), "holdfast.example")


def test_lists_may_be_separated_by_commas_or_spaces() -> None:
    settings = from_environment({**LEAST, "HOLDFAST_WATCH_NAMESPACES": "ml, team-a"})
    assert settings.watch_namespaces == ("ml", "team-a")


def test_without_a_memory_limit_there_is_none() -> None:
    assert from_environment(LEAST).memory_bytes is None
    assert from_environment({**LEAST, "HOLDFAST_MEMORY_BYTES": "536870912"}).memory_bytes == 512 << 20


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"HOLDFAST_SIDECAR_IMAGE": ""}, "HOLDFAST_SIDECAR_IMAGE"),
        ({"HOLDFAST_HTTP_PORT": "http"}, "HOLDFAST_HTTP_PORT"),
        ({"HOLDFAST_SIDECAR_RUN_AS_USER": "0"}, "HOLDFAST_SIDECAR_RUN_AS_USER"),
        ({"HOLDFAST_SIDECAR_RUN_AS_USER": "root"}, "HOLDFAST_SIDECAR_RUN_AS_USER"),
        ({"HOLDFAST_SIDECAR_RESOURCES": "{"}, "HOLDFAST_SIDECAR_RESOURCES"),
        ({"HOLDFAST_SIDECAR_RESOURCES": "[]"}, "HOLDFAST_SIDECAR_RESOURCES"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        from_environment({**LEAST, **change})


def test_missing_settings_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_NAMESPACE", "holdfast-system")
    monkeypatch.delenv("HOLDFAST_SIDECAR_IMAGE", raising=False)
    monkeypatch.setattr(main.logs, "set_up", lambda _level: None)
    monkeypatch.setattr(main.sys, "setrecursionlimit", lambda _levels: None)  # of this process, that is
    assert main.main() == os.EX_CONFIG
    assert caplog.messages == ["HOLDFAST_SIDECAR_IMAGE is not set"]
