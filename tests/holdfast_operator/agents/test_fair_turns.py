"""Turns go round over namespaces, and over the jobs of one, however many one of them asks for."""

from __future__ import annotations

import asyncio

from holdfast_operator.agents.fair_turns import Turns


def test_one_job_with_many_requests_holds_up_no_other() -> None:
    asked = [*[("a", "greedy")] * 6, ("a", "modest"), ("b", "other")]
    served: list[str] = []

    async def run() -> None:
        turns = Turns()

        async def ask(namespace: str, job: str) -> None:
            async with turns.of(namespace, job):
                await asyncio.sleep(0)
                served.append(job)

        await asyncio.gather(*(ask(*request) for request in asked))
        assert not turns._locks, "memory is kept of who no longer waits"

    asyncio.run(run())
    assert len(served) == len(asked)
    assert served.index("other") <= 2
    assert served.index("modest") <= 3
