"""Resources that a real API server takes, however odd: each has its word from the operator, and others train."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from kubernetes.client.exceptions import ApiException
from odd_resources import SPECS

DRAWN = 80
MOST_WORKERS = 3


def drawn() -> list[dict[str, Any]]:
    """The same ones each time, so that what fails can be looked at."""
    found: list[dict[str, Any]] = []

    @settings(max_examples=DRAWN, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(spec=SPECS)
    def draw(spec: dict[str, Any]) -> None:
        workers = {**spec["workers"], "replicas": min(spec["workers"]["replicas"], MOST_WORKERS)}
        found.append({**spec, "workers": workers})

    draw()
    return found


def test_whatever_the_api_server_takes_is_answered_and_holds_up_nobody(stage: Any) -> None:
    stage.nodes(3, cpu="64")
    taken = []
    for number, spec in enumerate(drawn()):
        body = {**stage.job(f"odd-{number}"), "spec": spec}
        try:
            stage.apply(body)
        except ApiException as error:
            if error.status not in (400, 422):
                raise
        else:
            taken.append(f"odd-{number}")
    assert len(taken) > DRAWN // 4, "most are odd in what the schema leaves open"

    player = stage.run(replicas=2)
    stage.wait(lambda: all(stage.status(name).get("status") for name in taken), "each has its word")
    stage.operator.restart()
    step = player.step
    stage.wait(lambda: (stage.status().get("progress") or {}).get("step", 0) > step, "the other trains on")
    assert stage.status().get("restartCount", 0) == 0
    errors = [line for line in stage.operator.lines() if line["level"] in ("error", "critical")]
    assert errors == []
