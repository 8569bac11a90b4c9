"""Logs: JSON, with job and generation in each line, and never a secret."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from holdfast_operator.runtime import logs

TOKEN = "eyJhbGciOiJSUzI1NiIsImtpZCI6IiJ9.eyJhdWQiOlsiaG9sZGZhc3QiXX0.c2lnbmF0dXJl"


class Log:
    """A logger that writes to memory."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(logs.JsonFormatter())
        self.logger = logging.getLogger(f"{__name__}.{id(self)}")
        self.logger.propagate = False
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(handler)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_line_is_about_its_job_and_generation(log: Log) -> None:
    logs.set_generation(2)
    with logs.about("ml/gpt"):
        logs.set_generation(3)
        log.logger.info("published %d members", 2)
    log.logger.info("idle")
    first, second = log.lines
    assert (first["job"], first["generation"], first["message"]) == ("ml/gpt", 3, "published 2 members")
    assert (second["job"], second["generation"]) == (None, None)


@pytest.mark.parametrize(
    "secret",
    [
        f"Authorization: Bearer {TOKEN}",
        f"token {TOKEN} refused",
        "bearer abc.def",
        "ab" * 32,
        "-----BEGIN PRIVATE KEY-----\nMIGH\n-----END PRIVATE KEY-----\n",
        "-----BEGIN EC PRIVATE KEY-----\nMIGH",
    ],
)
def test_secrets_are_hidden(log: Log, secret: str) -> None:
    log.logger.error("got %s", secret)
    text = log.stream.getvalue()
    assert "[hidden]" in text
    for piece in (TOKEN, "abc.def", "ab" * 32, "MIGH"):
        assert piece not in text


def test_a_secret_in_a_traceback_is_hidden(log: Log) -> None:
    try:
        raise ValueError(f"bad token {TOKEN}")
    except ValueError:
        log.logger.exception("refused")
    assert TOKEN not in log.stream.getvalue()
    assert "ValueError" in log.lines[0]["error"]


def test_names_and_digests_of_images_stay_readable(log: Log) -> None:
    text = "image registry/x@sha256:" + "ab" * 32 + " of job 0b9d8c1e-5b1c-4c7e-9d55-6a1f2c3d4e5f"
    log.logger.info(text)
    assert log.lines[0]["message"] == text
