"""Joining the world: `holdfast.init()`."""

from __future__ import annotations

import atexit
import logging
from pathlib import Path

from holdfast import faults
from holdfast.checkpoint.engine import Attempt, Engine, attempt_by_hand
from holdfast.config import JobConfig, effective
from holdfast.environment import Environment, read_environment
from holdfast.errors import UsageError
from holdfast.group import Group, join
from holdfast.job import Job
from holdfast.logs import LogContext, configure
from holdfast.rank_agent import Agent, NoAgent, RankAgent
from holdfast.worlds import Claim, Pair

_log = logging.getLogger("holdfast.job")


def init(
    *,
    checkpoint_dir: str | Path | None = None,
    checkpoint_interval: str | int | None = None,
    keep_last: int | None = None,
    resume: str | None = None,
) -> Job:
    """Join the world that the launcher formed; a script started by hand is a world of one.

    Under the operator every setting arrives in the environment. What is given here wins, and the effective values
    are logged once with where each came from.
    """
    environment = read_environment()
    config = effective(
        environment,
        checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir else None,
        checkpoint_interval=checkpoint_interval,
        keep_last=keep_last,
        resume=resume,
    )
    _configure_log(environment)
    agent = _connect(environment)
    job: Job | None = None

    def step() -> int:
        return 0 if job is None else job.committed_step

    reporter = faults.Reporter(agent, step)
    reporter.install()
    with faults.no_blame(agent, step):
        group = join(environment)
        attempt = _attempt(environment, config, agent, group)
    engine = _engine(config, attempt, agent, group)
    job = Job(group=group, agent=agent, attempt=attempt, config=config, engine=engine)
    atexit.register(job.close, failed=lambda: reporter.failed)
    if group.rank == 0:
        _log.info("configuration", extra={"fields": {"world_size": group.size, **config.described()}})
    return job


def _configure_log(environment: Environment) -> None:
    fields = {"pod": environment.pod_name, "generation": environment.generation, "attempt": environment.attempt}
    context = LogContext(fields={name: value for name, value in fields.items() if value})
    context.update(rank=environment.rank)
    configure(context)


def _connect(environment: Environment) -> Agent:
    if environment.agent_socket is None:
        return NoAgent()
    if environment.generation is None or environment.attempt is None:
        raise UsageError("HOLDFAST_AGENT_SOCKET is set without HOLDFAST_GENERATION and HOLDFAST_ATTEMPT: unset it")
    return RankAgent(
        environment.agent_socket,
        rank=environment.rank,
        local_rank=environment.local_rank,
        pair=Pair(environment.generation, environment.attempt),
    )


def _attempt(environment: Environment, config: JobConfig, agent: Agent, group: Group) -> Attempt:
    if environment.generation is None or environment.attempt is None:
        return attempt_by_hand(config.checkpoint_dir, group, environment.run_id)
    return Attempt(
        pair=Pair(environment.generation, environment.attempt),
        job_uid=environment.job_uid,
        publication=environment.publication,
        run_id=environment.run_id,
        known=agent.known_claims(),
    )


def _engine(config: JobConfig, attempt: Attempt, agent: Agent, group: Group) -> Engine | None:
    if config.checkpoint_dir is None:
        if group.rank == 0:
            _log.warning("no checkpoint folder is given: nothing outlives this world (checkpoint_dir=…)")
        return None

    def report(claims: tuple[Claim, ...]) -> None:
        agent.send("foreignClaims", claims=[claim.to_json() for claim in claims])

    return Engine(
        config.checkpoint_dir,
        attempt,
        group,
        keep_last=config.keep_last,
        resume=config.resume,
        on_foreign=report,
    )
