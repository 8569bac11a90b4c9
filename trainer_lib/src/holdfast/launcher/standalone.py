"""Runs a launcher without an operator: finds its address, and either serves the endpoint of the run or joins it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket
from dataclasses import dataclass

from holdfast.core.connections import own_address
from holdfast.core.environment import Environment, variable
from holdfast.core.errors import UsageError
from holdfast.core.log_format import LogContext
from holdfast.launcher.config import LauncherConfig
from holdfast.launcher.host.termination_log import Ending
from holdfast.launcher.launcher import Launcher
from holdfast.launcher.options import RunOptions
from holdfast.launcher.rendezvous import connection as rendezvous
from holdfast.launcher.rendezvous import endpoint
from holdfast.launcher.rendezvous.roster import Joined, Record, Roster, RunRequest

_log = logging.getLogger("holdfast.launcher")
_LOOPBACK_SECRET = b"this host only"
_JOIN_SECONDS = 600.0
_LOST_ENDPOINT_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class LauncherAddress:
    """The address of this launcher, the endpoint if there is one, and whether this launcher owns the endpoint."""

    host: str
    secret: bytes
    endpoint: tuple[str, int] | None = None
    listener: socket.socket | None = None

    @property
    def elsewhere(self) -> tuple[str, int] | None:
        """Return the endpoint of another launcher, which has the operator's role; None if this launcher has it."""
        return self.endpoint if self.listener is None else None


async def find_address(options: RunOptions, environment: Environment) -> LauncherAddress:
    """Resolve the endpoint, and bind it if it is an address of this host. Raises `UsageError`."""
    if options.endpoint is None:
        return LauncherAddress(host="127.0.0.1", secret=secrets.token_bytes(32))
    host, port = options.endpoint
    addresses = await endpoint.resolve(host, port, timeout=_JOIN_SECONDS)
    address = endpoint.choose(addresses)
    secret = _secret(environment, host, address)
    if options.max_nodes > 1:
        for text in endpoint.remarks(host, addresses):
            _log.warning("%s", text)
    try:
        bound = await asyncio.to_thread(endpoint.bind, address, port)
        own = await asyncio.to_thread(own_address, address, port)
    except OSError as error:
        raise UsageError(f"holdfast run: --rdzv-endpoint {host}:{port} cannot be used: {error}") from error
    if bound.elsewhere:
        text = "--rdzv-endpoint %s is %s, which is not an address of this host: another host's launcher must own it"
        _log.info(text + " (no host owns the address of a Service)", host, address)
    return LauncherAddress(host=own, secret=secret, endpoint=options.endpoint, listener=bound.listener)


def _secret(environment: Environment, host: str, address: str) -> bytes:
    if environment.job_key_file is None:
        if not ipaddress.ip_address(address).is_loopback:
            raise UsageError(
                f"holdfast run: --rdzv-endpoint {host} is reached over a network, so the launchers need a common"
                f" key: put the same random bytes into a file on each host and name it in {variable('job_key_file')}"
            )
        return _LOOPBACK_SECRET
    try:
        secret = environment.job_key_file.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"{variable('job_key_file')} cannot be read: {error}") from error
    if len(secret) < 16:
        raise UsageError(f"{variable('job_key_file')} has fewer than 16 bytes: create it with 'openssl rand -hex 32'")
    return secret


class Standalone:
    """A launcher, and in addition the endpoint of the run or the connection to it."""

    def __init__(
        self, config: LauncherConfig, context: LogContext, place: LauncherAddress, terms: RunRequest
    ) -> None:
        self._place = place
        self._config = config
        self._terms = terms
        self._agent = Launcher(config, context)

    async def run(self) -> Ending:
        """Run both until the launcher exits."""
        agent = asyncio.create_task(self._agent.run())
        meeting = asyncio.create_task(self._rendezvous())
        await asyncio.wait([agent, meeting], return_when=asyncio.FIRST_COMPLETED)
        if not agent.done():
            await self._endpoint_lost(agent, meeting)
        meeting.cancel()
        await asyncio.gather(meeting, return_exceptions=True)
        return await agent

    async def _endpoint_lost(self, agent: asyncio.Task[Ending], meeting: asyncio.Task[None]) -> None:
        """The endpoint closes before its last message is processed: wait a moment for that."""
        error = meeting.exception()
        await asyncio.wait([agent], timeout=0.0 if error else _LOST_ENDPOINT_SECONDS)
        if not agent.done():
            self._agent.fault(str(error) if error else "the launcher at --rdzv-endpoint is lost: the run ends")

    async def _rendezvous(self) -> None:
        await self._agent.listening.wait()
        identity = self._config.identity
        own = Joined.of(
            uid=identity.pod_uid,
            name=identity.pod,
            host=self._config.host,
            control=self._agent.peers.control.port,
            store=self._config.store_port,
            node=identity.node,
        )
        if self._place.elsewhere is None:
            await self._be_endpoint(own)
        else:
            await self._be_member(own, *self._place.elsewhere)

    async def _be_endpoint(self, own: Joined) -> None:
        served = rendezvous.Endpoint(
            roster=Roster(terms=self._terms, publication=secrets.token_hex(4)),
            secret=self._place.secret,
            accept=self._agent.see_membership,
            record=self._record,
            on_rejected=self._agent.peers.connection_rejected,
            now=self._agent.pump.now,
        )
        await served.serve(self._place.listener, own)

    async def _be_member(self, own: Joined, host: str, port: int) -> None:
        connection = await rendezvous.dial(host, port, me=own.uid, secret=self._place.secret, timeout=_JOIN_SECONDS)
        await rendezvous.join(
            connection,
            own=own,
            requested=self._terms.shared_options(),
            secret=self._place.secret,
            accept=self._agent.see_membership,
        )

    def _record(self) -> Record:
        """Return what the endpoint must record, as this launcher received it."""
        state = self._agent.pump.state
        over = tuple(incident.attempt_id for incident in state.incidents if incident.resumed is not None)
        return Record(started=state.started, acknowledged=over, foreign=state.foreign)
