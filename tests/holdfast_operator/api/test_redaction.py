"""What containers wrote comes into statuses and events without the credentials that it held."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast_operator.api.redaction import hide_secrets
from holdfast_operator.decision.failures.causes import of_exit
from holdfast_operator.views import parse_pod, parse_report

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
JWT = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJzdWIiOiJ4In0.c2ln"
KEY_ID = "AKIA" + "IOSFODNN7EXAMPLE"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Basic dXNlcjpwYXNz", "dXNl"),
        ("401 {'authorization': 'Basic dXNlcjpwYXNz'}", "dXNl"),
        (f"sent header Bearer {JWT}", "eyJ"),
        (f"the claim was {JWT}", "eyJ"),
        (f"AWS_ACCESS_KEY_ID {KEY_ID}", "AKIA"),
        ("boto3 AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI", "wJal"),
        ("login(token='hf_QWERTY123')", "hf_"),
        ("x-api-key: 12345678", "1234"),
        ("postgres://u:hunter2@db/x", "hunter2"),
        ("https://s/x?X-Amz-Signature=abcdef0123", "abcdef"),
        ("error: password=hunter2", "hunter2"),
        ("k9Yp\nAAAA==\n-----END RSA PRIVATE KEY-----\nexit", "k9Yp"),
    ],
)
def test_a_credential_is_hidden(text: str, secret: str) -> None:
    assert secret not in hide_secrets(text)
    assert "[hidden]" in hide_secrets(text)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: tokenizer of 32000 words, tokens seen 12",
        "image registry/x@sha256:" + "a" * 64,
        "basic training ended: loss is negative",
        "https://hub/x: not found, ask me@example.com",
    ],
)
def test_what_is_no_credential_stays(text: str) -> None:
    assert hide_secrets(text) == text


@pytest.mark.parametrize("piece", ["token", "token-", "token ", "eyJ", "://a", "bearer ", "a" * 63 + " ", "AKIA"])
def test_no_text_takes_long(piece: str) -> None:
    text = (piece * 200_000)[:200_000]
    began = time.process_time()
    hide_secrets(text)
    assert time.process_time() - began < 2


def pod(message: str) -> dict[str, Any]:
    state = {"terminated": {"exitCode": 1, "reason": "Error", "message": message}}
    return {
        "metadata": {"name": "gpt-w0", "uid": "u", "namespace": "n"},
        "spec": {"nodeName": "n1", "containers": [{"name": "trainer"}]},
        "status": {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": state}]},
    }


def test_end_of_a_log_is_redacted_in_the_status() -> None:
    """Credentials are removed from the last lines of a log."""
    view = parse_pod(pod("Traceback\nConnectionError: postgres://u:hunter2@db/x\n"))
    words = of_exit(view, None, NOON).message
    assert "ConnectionError" in words
    assert "hunter2" not in words


def test_launchers_message_is_redacted_in_the_status() -> None:
    """Credentials are removed from messages of launchers."""
    told = {"generation": 1, "attempt": 1, "message": "password=hunter2"}
    launcher = {
        "version": 1,
        "incidents": [told],
        "message": "password=hunter2",
        "exit": {"code": 1, "message": "password=hunter2"},
    }
    report = parse_report({"version": 1, "pod": {"uid": "u"}, "launcher": launcher}, NOON)
    assert report is not None
    assert report.exit is not None
    assert "hunter2" not in report.message + report.incidents[0].message + report.exit.message
