"""``python -m holdfast_operator.helm_test JOB SECONDS``: run this job (JSON) to its end, and report its progress.

``helm test`` runs it in the operator's own image. The exit code is 0 if the job completes within this many seconds.
The job is deleted in either case.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Protocol, cast

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.status import ConditionType
from holdfast_operator.main import api_client

POLL_SECONDS = 1.0
REQUEST_SECONDS = 10.0


class Jobs(Protocol):
    """One job by name."""

    def create(self, body: Json) -> None: ...

    def read(self) -> Json | None: ...

    def delete(self) -> None: ...


class ClusterJobs:
    """``Jobs`` of a cluster."""

    def __init__(self, api: client.CustomObjectsApi, namespace: str, name: str) -> None:
        self._api = api
        self._kind = (c.GROUP, c.API_VERSION, namespace, c.PLURAL)
        self._name = name

    def create(self, body: Json) -> None:
        self._api.create_namespaced_custom_object(*self._kind, dict(body), _request_timeout=REQUEST_SECONDS)

    def read(self) -> Json | None:
        try:
            found = self._api.get_namespaced_custom_object(*self._kind, self._name, _request_timeout=REQUEST_SECONDS)
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return cast(Json, found)

    def delete(self) -> None:
        try:
            self._api.delete_namespaced_custom_object(*self._kind, self._name, _request_timeout=REQUEST_SECONDS)
        except ApiException as error:
            if error.status != 404:
                raise


def verdict(job: Json) -> tuple[bool | None, str]:
    """Return whether the job passed the test (None while it is open), and the message of its state."""
    status = job.get("status") or {}
    conditions = status.get("conditions") or []
    true = {str(one["type"]): one for one in conditions if one.get("status") == "True"}
    for kind, good in ((ConditionType.COMPLETE, True), (ConditionType.FAILED, False)):
        if kind in true:
            return good, f"{kind}: {true[kind].get('message', '')}"
    told = next((str(one.get("message") or "") for one in true.values()), "")
    return None, f"{status.get('status') or 'not seen by the operator yet'}: {told}".rstrip(": ")


def run(
    jobs: Jobs,
    body: Json,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = print,
) -> bool:
    """Create the job and wait for its end. Return whether it completed."""
    until, said = clock() + seconds, ""
    jobs.delete()
    while jobs.read() is not None and clock() < until:
        sleep(POLL_SECONDS)
    jobs.create(body)
    try:
        while clock() < until:
            good, words = verdict(jobs.read() or {})
            if words != said:
                say(words)
                said = words
            if good is not None:
                return good
            sleep(POLL_SECONDS)
        say(f"not complete after {seconds:.0f} s")
        return False
    finally:
        jobs.delete()


def main(arguments: list[str]) -> int:
    """Run the test; 0 if the job completed."""
    body, seconds = json.loads(arguments[0]), float(arguments[1])
    meta = body["metadata"]
    jobs = ClusterJobs(client.CustomObjectsApi(api_client()), meta["namespace"], meta["name"])
    return 0 if run(jobs, body, seconds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
