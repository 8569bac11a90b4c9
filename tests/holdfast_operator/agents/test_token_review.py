"""Whose token is it: verdicts are remembered for a while, and only a token bound to one pod counts."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_operator.agents.token_review import POD_NAME_KEY, POD_UID_KEY, TokenReviews, identity_of
from holdfast_operator.cluster.agent_hub import PodIdentity
from holdfast_operator.errors import AuthenticationUnavailableError

POD = PodIdentity(namespace="ml", pod="gpt-w0", pod_uid="uid-w0")


class Reviews:
    """The API server's side: answers what it is told to, counts the questions."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.asked = 0
        self.answer: PodIdentity | Exception | None = POD

    def __call__(self, _token: str) -> PodIdentity | None:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_verdict_is_asked_for_anew_after_45_seconds() -> None:
    server = Reviews()
    tokens = TokenReviews(server, clock=lambda: server.now)
    assert (tokens("a"), tokens("a"), server.asked) == (POD, POD, 1)
    server.now += 44.9
    assert (tokens("a"), server.asked, tokens.due("a")) == (POD, 1, False)
    server.answer = None
    server.now += 0.1
    assert tokens.due("a")
    assert (tokens("a"), server.asked) == (None, 2)
    assert tokens.recall("a") is None, "what was refused since serves no longer"


def test_valid_review_is_not_repeated() -> None:
    """A known token causes no review while its result is valid."""
    server = Reviews()
    tokens = TokenReviews(server, clock=lambda: server.now)
    assert tokens.recall("a") is None
    tokens("a")
    assert (tokens.recall("a"), tokens.recall("b"), server.asked) == (POD, None, 1)
    server.answer = AuthenticationUnavailableError("no API server")
    server.now += 60.0
    with pytest.raises(AuthenticationUnavailableError):
        tokens("a")
    assert tokens.recall("a") == POD, "it serves while its renewal is under way"
    server.now += 60.0
    assert tokens.recall("a") is None


def test_a_flood_of_refusals_drives_out_no_verdict() -> None:
    server = Reviews()
    tokens = TokenReviews(server, clock=lambda: server.now, entries=10, refusals=10)
    tokens("good")
    server.answer = None
    for number in range(100):
        tokens(str(number))
    assert tokens.recall("good") == POD
    tokens("99")
    assert server.asked == 101


def test_each_token_has_its_own_verdict() -> None:
    server = Reviews()
    tokens = TokenReviews(server, clock=lambda: server.now)
    tokens("a")
    server.answer = None
    assert (tokens("b"), tokens("a")) == (None, POD)


def test_a_refusal_is_forgotten_soon() -> None:
    server = Reviews()
    server.answer = None
    tokens = TokenReviews(server, clock=lambda: server.now)
    assert (tokens("a"), tokens("a"), server.asked) == (None, None, 1)
    server.answer = POD
    server.now += 5
    assert tokens("a") == POD


def test_an_outage_is_no_verdict() -> None:
    server = Reviews()
    server.answer = AuthenticationUnavailableError("no API server")
    tokens = TokenReviews(server, clock=lambda: server.now)
    with pytest.raises(AuthenticationUnavailableError):
        tokens("a")
    server.answer = POD
    assert tokens("a") == POD


def test_a_flood_of_tokens_does_not_grow_without_bound() -> None:
    server = Reviews()
    tokens = TokenReviews(server, clock=lambda: server.now, entries=10)
    for number in range(100):
        tokens(str(number))
    tokens("99")
    assert server.asked == 100
    tokens("0")
    assert server.asked == 101


GOOD: dict[str, Any] = {
    "authenticated": True,
    "audiences": ["holdfast"],
    "username": "system:serviceaccount:ml:default",
    "extra": {POD_UID_KEY: ["uid-w0"], POD_NAME_KEY: ["gpt-w0"]},
}


def test_a_pods_token_for_our_audience_names_the_pod() -> None:
    assert identity_of(**GOOD) == POD


@pytest.mark.parametrize(
    "change",
    [
        {"authenticated": False},
        {"audiences": ["https://kubernetes.default.svc"]},
        {"audiences": []},
        {"username": "system:node:node-1"},
        {"username": "alice"},
        {"extra": {}},
        {"extra": {POD_UID_KEY: ["a", "b"], POD_NAME_KEY: ["a"]}},
        {"extra": {POD_UID_KEY: ["a"]}},
    ],
)
def test_any_other_token_names_nobody(change: dict[str, Any]) -> None:
    assert identity_of(**{**GOOD, **change}) is None
