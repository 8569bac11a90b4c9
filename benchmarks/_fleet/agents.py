"""Launchers and sidecars of the jobs that train, played by the rules of protocol.md over the real agents' API.

One player for each job: its launchers form worlds as the membership says, go on with a majority when one of them
dies, and report once a second, or at once when something has changed, as real sidecars do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp

from _fleet.api import Api
from _fleet.fleet import Job

REPORT_SECONDS = 1.0
Json = dict[str, Any]


def stamp() -> str:
    """Now, as in the contract."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Agent:
    """The sidecar of one pod: a real token bound to the pod, real HTTPS."""

    def __init__(self, player: Player, pod: Json, token: str) -> None:
        self.player, self.pod = player, pod
        self.uid = str(pod["metadata"]["uid"])
        self.news = asyncio.Event()
        self.membership: Json | None = None
        self._headers = {"Authorization": f"Bearer {token}"}
        self._numbers = itertools.count(1)
        self._tasks = [asyncio.create_task(self._report()), asyncio.create_task(self._poll())]

    def stop(self) -> None:
        """It dies without a word."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()  # which is an error: none of them ends by itself
            task.cancel()

    async def _report(self) -> None:
        while True:
            meta = self.pod["metadata"]
            body = {
                "version": 1,
                "sidecar": {"startId": self.uid[:8], "number": next(self._numbers)},
                "pod": {**{key: meta[key] for key in ("namespace", "name", "uid")}, "node": self.node},
                "launcher": self.player.status(self),
                "launcherSilentSeconds": 0.1,
                "notices": [],
                "gpu": [],
            }
            await self._call("POST", "/v1/report", json.dumps(body).encode())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), REPORT_SECONDS)
            self.news.clear()

    @property
    def node(self) -> str:
        """Where it runs."""
        return str(self.pod["spec"]["nodeName"])

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
        """Since when, by pod UID."""
        self.world: Json | None = None
        self.broken = False
        self.seen: set[str] = set()
        self.incidents: list[Json] = []
        self.began = time.monotonic()

    @property
    def whole(self) -> bool:
        """All its workers train in one world."""
        return self.world is not None and not self.broken and len(self.world["members"]) == self.job.workers

    def join(self, pod: Json, token: str) -> None:
        """A launcher starts in a pod."""
        agent = Agent(self, pod, token)
        self.agents[agent.uid] = agent

    def lose(self, uid: str) -> None:
        """A launcher dies; its peers see it at once."""
        self.dead[uid] = stamp()
        self.agents.pop(uid).stop()
        self.look()

    def look(self) -> None:
        """A new world where the rules allow one."""
        documents = [agent.membership for agent in self.agents.values() if agent.membership]
        if documents:
            self._form(max(documents, key=lambda found: int(found["revision"])))
        for agent in self.agents.values():
            agent.news.set()

    def _form(self, document: Json) -> None:
        members = [str(member["podUID"]) for member in document["members"]]
        told = [_pair(entry) for entry in document["acknowledged"]]
        self.incidents = [incident for incident in self.incidents if _pair(incident) not in told]
        generation, up, current = int(document["generation"]), set(self.agents), self.world
        newer = current is None or generation > current["generation"]
        if newer and set(members) <= up:
            self._enter(document, generation, 1, members)
        elif not newer and current is not None and not set(current["members"]) <= up:
            survivors = [uid for uid in current["members"] if uid in up]
            enough = 2 * len(survivors) > len(members) and len(survivors) >= document["settings"]["minReplicas"]
            self.broken = not (document["settings"]["onFailure"] == "Shrink" and enough)
            if not self.broken:
                self._enter(document, generation, current["attempt"] + 1, survivors)

    def _enter(self, document: Json, generation: int, attempt: int, members: list[str]) -> None:
        ended = self.world
        gone = [uid for uid in ended["members"] if uid in self.dead and uid not in members] if ended else []
        if ended and gone:
            self.incidents.append(self._incident(ended, gone))
        self.world = {
            "generation": generation,
            "attempt": attempt,
            "publication": document["publication"],
            "members": members,
            "coordinator": members[0],
        }
        self.broken, self.seen = False, self.seen | set(members)

    def _incident(self, ended: Json, gone: list[str]) -> Json:
        return {
            "generation": ended["generation"],
            "attempt": ended["attempt"],
            "cause": "Infrastructure",
            "action": "Shrink",
            "reason": "WorkerLost",
            "message": f"{len(gone)} workers gone",
            "pod": None,
            "rank": None,
            "node": None,
            "detectedTime": stamp(),
            "resumedTime": stamp(),
            "lostSteps": 0,
        }

    def status(self, agent: Agent) -> Json:
        """What a launcher writes."""
        inside = self.world is not None and agent.uid in self.world["members"] and not self.broken
        pair = {key: self.world[key] for key in ("generation", "attempt")} if inside and self.world else None
        step = int(2 * (time.monotonic() - self.began))
        return {
            "version": 1,
            "podUID": agent.uid,
            "pod": agent.pod["metadata"]["name"],
            "node": agent.node,
            "ready": True,
            "ports": {"store": 29400, "control": 29401},
            "accepted": pair,
            "started": pair,
            "world": self.world if inside else None,
            "phase": "Running" if inside else "Waiting",
            "message": "",
            "committedStep": step if inside else None,
            "committedAt": stamp() if inside else None,
            "ranks": [],
            "checkpoints": {},
            "highestClaim": None,
            "foreignClaims": [],
            "quarantined": [],
            "loss": 2.0,
            "throughput": 100.0,
            "incidents": self.incidents if inside else [],
            "notices": [],
            "lostMembers": [
                {"podUID": uid, "since": since, "how": "Silent"}
                for uid, since in self.dead.items()
                if inside and uid in self.seen
            ],
            "exit": None,
        }


class Stage:
    """The players of all jobs of one namespace."""

    def __init__(self, api: Api, operator_port: int, namespace: str) -> None:
        self.operator = f"https://127.0.0.1:{operator_port}"
        self.players: dict[str, Player] = {}
        self.pods: dict[str, Json] = {}
        self._api, self._namespace = api, namespace
        self.http: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def open(self, jobs: list[Job]) -> AsyncIterator[None]:
        """Launchers start in whatever pods of these jobs run."""
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
                watch.cancel()
                for player in self.players.values():
                    for agent in player.agents.values():
                        agent.stop()
                await asyncio.sleep(0)

    async def _watch(self) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        starting: set[asyncio.Task[None]] = set()
        async for kind, pod in self._api.watch(path):
            uid = str(pod["metadata"]["uid"])
            if kind == "DELETED" or pod["status"].get("phase") != "Running":
                self.pods.pop(uid, None)
            elif uid not in self.pods:
                self.pods[uid] = pod
                task = asyncio.create_task(self._join(pod))
                starting.add(task)
                task.add_done_callback(starting.discard)

    async def _join(self, pod: Json) -> None:
        meta = pod["metadata"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        spec = {"audiences": ["holdfast"], "boundObjectRef": bound, "expirationSeconds": 3600}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/default/token"
        made = await self._api.call("POST", path, body)
        self.players[meta["labels"]["holdfast.dev/job-name"]].join(pod, made["status"]["token"])


def _pair(value: Json) -> tuple[int, int]:
    return int(value["generation"]), int(value["attempt"])
