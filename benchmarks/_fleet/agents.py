"""Simulated launchers and sidecars of the jobs that train, by the rules of protocol.md, over the real agents' API.

Each job has one player. Its launchers form worlds as the membership requires, and continue with a majority after a
loss. They report once per second, and at once after a change, as real sidecars do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from _fleet.api import Api
from _fleet.fleet import Job
from holdfast_testbed.clock import stamp
from holdfast_testbed.fakes import fake_agents
from holdfast_testbed.fakes.fake_agents import Json

REPORT_SECONDS = 1.0


class Agent:
    """The sidecar of one pod: a real token bound to the pod, real HTTPS."""

    def __init__(self, player: Player, pod: Json, token: str) -> None:
        self.player, self.pod = player, pod
        meta, node = pod["metadata"], pod["spec"]["nodeName"]
        self.worker = fake_agents.Worker(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"], node=node)
        self.news = asyncio.Event()
        self.membership: Json | None = None
        self._headers = {"Authorization": f"Bearer {token}"}
        self._numbers = itertools.count(1)
        self.tasks = [asyncio.create_task(self._report()), asyncio.create_task(self._poll())]

    def stop(self) -> None:
        """End it without a message."""
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.result()  # which raises: none of them ends by itself
            task.cancel()

    async def _report(self) -> None:
        while True:
            body = fake_agents.report(self.worker, self.player.status(self.worker), number=next(self._numbers))
            await self._call("POST", "/v1/report", json.dumps(body).encode())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), REPORT_SECONDS)
            self.news.clear()

    async def _poll(self) -> None:
        while True:
            after = self.membership["revision"] if self.membership else 0
            status, document = await self._call("GET", f"/v1/membership?after={after}")
            if status == 200:
                self.membership = document
                self.player.look()
            elif status != 204:
                await asyncio.sleep(0.5)

    async def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        stage = self.player.stage
        try:
            async with stage.http.request(
                method, f"{stage.operator}{path}", data=body, headers=self._headers
            ) as answer:
                raw = await answer.read()
                return answer.status, json.loads(raw) if raw else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, None


class Player:
    """All launchers of one job."""

    def __init__(self, stage: Stage, job: Job) -> None:
        self.stage, self.job = stage, job
        self.agents: dict[str, Agent] = {}
        self.dead: dict[str, str] = {}
        """The time of each loss, by pod UID."""
        self.world: Json | None = None
        self.broken = False
        self.seen: set[str] = set()
        self.incidents: list[Json] = []
        self.began = time.monotonic()

    @property
    def whole(self) -> bool:
        """Return whether all workers of the job train in one world."""
        return self.world is not None and not self.broken and len(self.world["members"]) == self.job.workers

    def join(self, pod: Json, token: str) -> None:
        """Start a launcher in a pod."""
        agent = Agent(self, pod, token)
        self.agents[agent.worker.uid] = agent

    def lose(self, uid: str) -> None:
        """End a launcher; its peers detect this at once."""
        self.dead[uid] = stamp()
        self.agents.pop(uid).stop()
        self.look()

    def look(self) -> None:
        """Form a new world if the rules allow one."""
        membership = fake_agents.newest(agent.membership for agent in self.agents.values())
        if membership is not None:
            self._form(membership)
        for agent in self.agents.values():
            agent.news.set()

    def _form(self, membership: Json) -> None:
        ended, up = self.world, self.agents.keys()
        self.incidents = fake_agents.unacknowledged(self.incidents, membership)
        self.world, self.broken = fake_agents.form(membership, ended, broken=self.broken, up=up)
        gone = [uid for uid in fake_agents.gone(ended, self.world) if uid in self.dead]
        if ended and gone:
            self.incidents.append(fake_agents.incident(ended, gone, at=stamp()))
        self.seen |= set(self.world["members"] if self.world else ())

    def status(self, worker: fake_agents.Worker) -> Json:
        """Return a launcher's status. A launcher whose world is broken is in none."""
        return fake_agents.status(
            worker,
            None if self.broken else self.world,
            step=int(2 * (time.monotonic() - self.began)),
            at=stamp(),
            incidents=self.incidents,
            lost={uid: since for uid, since in self.dead.items() if uid in self.seen},
        )


class Stage:
    """The players of all jobs of one namespace."""

    def __init__(self, api: Api, operator_port: int, namespace: str) -> None:
        self.operator = f"https://127.0.0.1:{operator_port}"
        self.players: dict[str, Player] = {}
        self.pods: dict[str, Json] = {}
        self.late: list[float] = []
        """Seconds between the creation of a pod and its start, as observed here: the time of scheduler and kwok."""
        self._made: dict[str, float] = {}
        self._api, self._namespace = api, namespace
        self._starting: set[asyncio.Task[None]] = set()
        self.http: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def open(self, jobs: list[Job]) -> AsyncIterator[None]:
        """Start launchers in all running pods of these jobs."""
        self.players = {job.name: Player(self, job) for job in jobs}
        config = await self._api.call(
            "GET", f"/api/v1/namespaces/{self._namespace}/configmaps/{jobs[0].name}-holdfast-ca"
        )
        context = ssl.create_default_context(cadata=config["data"]["ca.crt"])
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.http:
            watch = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                agents = [agent for player in self.players.values() for agent in player.agents.values()]
                for agent in agents:
                    agent.stop()
                rest = {watch, *self._starting}
                for task in rest:
                    task.cancel()
                # None of them may send a request once the session is closed.
                await asyncio.gather(
                    *rest, *(task for agent in agents for task in agent.tasks), return_exceptions=True
                )

    async def _watch(self) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        async for kind, pod in self._api.watch(path):
            uid, phase = str(pod["metadata"]["uid"]), pod["status"].get("phase")
            if kind == "ADDED" and phase == "Pending":
                self._made[uid] = time.monotonic()
            if kind == "DELETED" or phase != "Running":
                self.pods.pop(uid, None)
            elif uid not in self.pods:
                self.pods[uid] = pod
                if uid in self._made:
                    self.late.append(time.monotonic() - self._made.pop(uid))
                task = asyncio.create_task(self._join(pod))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)

    async def _join(self, pod: Json) -> None:
        meta = pod["metadata"]
        body = fake_agents.token_request(pod=meta["name"], uid=meta["uid"])
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/default/token"
        made = await self._api.call("POST", path, body)
        self.players[meta["labels"]["holdfast.dev/job-name"]].join(pod, made["status"]["token"])
