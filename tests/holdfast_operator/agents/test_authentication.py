"""Whose request it is: tokens are reviewed once, in the background where possible, and one peer holds up no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from agents_api import LIMITS, WORKER, Api, body, identify, wait_for

from holdfast_operator.cluster.agent_hub import PodIdentity


def test_a_known_pod_may_report_while_no_token_can_be_reviewed(api: Api) -> None:
    assert api.call("POST", "/v1/report", "down", body())[0] == 503
    api.hub.recall = {"down": identify(WORKER)}.get
    assert api.call("POST", "/v1/report", "down", body())[0] == 200


class SlowReviews:
    """Reviews that wait until they are let go."""

    def __init__(self, api: Api) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()
        api.hub.authenticate = self

    def __call__(self, token: str) -> PodIdentity | None:
        self.asked.append(token)
        self.go.wait(120)
        return identify(token)


def test_of_one_token_there_is_one_question_at_a_time(api: Api) -> None:
    reviews, came = SlowReviews(api), list[str]()
    api.hub.recall = came.append  # None is known of any
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(api.call, "POST", "/v1/report", body=body()) for _ in range(4)]
        wait_for(lambda: len(came) == 4)
        time.sleep(0.5)  # for a second question, which must not be asked
        reviews.go.set()
        assert [answer.result()[0] for answer in answers] == [200] * 4
    assert reviews.asked == [WORKER]


def test_a_verdict_serves_while_it_is_renewed_in_the_background(api: Api) -> None:
    reviews = SlowReviews(api)
    api.hub.recall, api.hub.due = identify, lambda _token: True
    for _ in range(3):
        assert api.call("POST", "/v1/report", body=body())[0] == 200
    wait_for(lambda: reviews.asked == [WORKER])
    reviews.go.set()


def test_a_flood_of_unknown_tokens_leaves_threads_to_others(start: Callable[..., Api]) -> None:
    api = start(replace(LIMITS, authentications_of_a_peer=2, authentications_waiting_of_a_peer=4))
    reviews = SlowReviews(api)
    with ThreadPoolExecutor(4) as pool:
        flood = [pool.submit(api.call, "GET", "/v1/membership", f"bad{number}") for number in range(4)]
        wait_for(lambda: api.server.reviews_waiting == 4 and len(reviews.asked) >= 2)
        assert api.call("GET", "/v1/membership", "bad5")[0] == 503
        assert len(reviews.asked) == 2
        api.hub.recall, api.hub.due = {WORKER: identify(WORKER)}.get, lambda _token: True
        assert api.call("POST", "/v1/report", body=body())[0] == 200
        wait_for(lambda: WORKER in reviews.asked)
        reviews.go.set()
        assert [answer.result()[0] for answer in flood] == [401] * 4
    assert api.call("GET", "/v1/membership", "bad6")[0] == 401


@pytest.mark.parametrize("token", [None, "", "nonsense", "x" * 9000, "pod:uid-w0\xff"])
def test_without_a_good_token_nothing_is_said(api: Api, token: str | None) -> None:
    status, _ = api.call("GET", "/v1/membership", token=token)
    assert status in (400, 401)  # 400: the header itself is too long


def test_the_token_of_another_pod_is_refused(api: Api) -> None:
    api.hub.bind("uid-x", "job-1")
    status, content = api.call("POST", "/v1/report", token="pod:uid-x", body=body())
    assert status == 403
    assert "another pod" in content["error"]


def test_agents_retry_while_the_api_server_is_away(api: Api) -> None:
    assert api.call("GET", "/v1/membership", token="down") == (503, {"version": 1, "leader": None})
