"""``spec``: the user's description of the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.reasons import Cause
from holdfast_operator.api.spec.checkpoint import CheckpointSpec, parse_checkpoint
from holdfast_operator.api.spec.fields import choice, integer, items, mapping, optional_integer
from holdfast_operator.api.spec.hang import HangSpec, parse_hang, parse_hang_rule
from holdfast_operator.api.spec.pod_template import parse_template, trainer_container
from holdfast_operator.api.spec.preflight import PreflightSpec, parse_preflight
from holdfast_operator.api.spec.processes import processes
from holdfast_operator.api.spec.recovery import (
    Backoff,
    Budget,
    Escalation,
    Rule,
    parse_backoff,
    parse_budgets,
    parse_escalation,
    parse_rules,
)
from holdfast_operator.api.spec.scheduling import Scheduling, parse_scheduling


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The spec of a job."""

    replicas: int
    template: Json = field(hash=False)
    spares: int = 0
    processes_per_worker: int = 1
    min_replicas: int = 1
    replica_step: int = 1
    max_replicas: int = 0  # at least replicas, after parsing
    rendezvous: str = c.HOLDFAST
    on_failure: str = c.SHRINK
    shrink_after_seconds: int = 0
    grow_cooldown_seconds: int = 300
    budgets: tuple[Budget, ...] = (Budget(cause=Cause.APPLICATION, max_restarts=3),)
    backoff: Backoff = field(default_factory=Backoff)
    rules: tuple[Rule, ...] = ()
    escalation: Escalation | None = None
    avoid_repeat_offenders: int = 0
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    startup_deadline_seconds: int = 1200
    remediation_opt_out: bool = False
    scheduling: Scheduling = field(default_factory=Scheduling)
    hang: HangSpec | None = None  # None: the launchers' defaults
    preflight: PreflightSpec | None = None
    providers: tuple[str, ...] = c.PROVIDERS
    checkpoint_deadline_seconds: int = 25
    suspend: bool = False
    active_deadline_seconds: int | None = None
    ttl_seconds: int | None = None  # after the end; None: the job is not deleted

    @property
    def drain_seconds(self) -> int:
        """How long a drained launcher may take for its checkpoint, in seconds; longer while the job is suspended."""
        if not self.suspend:
            return self.checkpoint_deadline_seconds
        return max(self.checkpoint_deadline_seconds, (self.hang or HangSpec()).checkpoint)

    @property
    def launched(self) -> bool:
        """Return whether Holdfast's launcher runs in the workers. Otherwise their inner state is not known."""
        return self.rendezvous == c.HOLDFAST

    @property
    def shrinkable(self) -> bool:
        """Return whether a world may train without some members of its generation."""
        return self.on_failure == c.SHRINK

    @property
    def pod_spec(self) -> Json:
        spec: Json = self.template["spec"]
        return spec

    def budget(self, cause: Cause) -> Budget | None:
        """Return the budget of a cause; None: no limit."""
        return next((budget for budget in self.budgets if budget.cause == cause), None)


def parse_spec(value: Any) -> JobSpec:
    """Parse the spec of a resource. Raises ``UnreadableError`` with the path of the wrong field."""
    spec = mapping(value, "spec")
    workers = mapping(spec.get("workers"), "spec.workers")
    elasticity = mapping(spec.get("elasticity", {}), "spec.elasticity")
    recovery = mapping(spec.get("recovery", {}), "spec.recovery")
    interruption = mapping(spec.get("interruption", {}), "spec.interruption")
    replicas = integer(workers, "replicas", "spec.workers", minimum=1)
    template = parse_template(workers.get("template"))
    return JobSpec(
        replicas=replicas,
        template=template,
        spares=integer(workers, "spares", "spec.workers", 0, minimum=0),
        processes_per_worker=_processes(workers, template["spec"]),
        min_replicas=integer(elasticity, "minReplicas", "spec.elasticity", replicas, minimum=1),
        replica_step=integer(elasticity, "replicaStep", "spec.elasticity", 1, minimum=1),
        max_replicas=max(replicas, optional_integer(elasticity, "maxReplicas", "spec.elasticity", minimum=1) or 0),
        rendezvous=choice(
            mapping(spec.get("rendezvous", {}), "spec.rendezvous"),
            "backend",
            "spec.rendezvous",
            (c.HOLDFAST, c.C10D, c.NO_RENDEZVOUS),
            c.HOLDFAST,
        ),
        on_failure=choice(elasticity, "onFailure", "spec.elasticity", (c.SHRINK, c.REPLACE, c.WAIT), c.SHRINK),
        shrink_after_seconds=integer(elasticity, "shrinkAfterSeconds", "spec.elasticity", 0, minimum=0),
        grow_cooldown_seconds=integer(elasticity, "growCooldownSeconds", "spec.elasticity", 300, minimum=0),
        budgets=parse_budgets(recovery),
        backoff=parse_backoff(recovery),
        rules=(*parse_rules(recovery), *parse_hang_rule(spec)),
        escalation=parse_escalation(recovery),
        avoid_repeat_offenders=integer(recovery, "avoidRepeatOffenders", "spec.recovery", 0, minimum=0),
        checkpoint=parse_checkpoint(spec),
        startup_deadline_seconds=integer(spec, "startupDeadlineSeconds", "spec", 1200, minimum=1),
        remediation_opt_out=_ignores_remediation(spec),
        scheduling=parse_scheduling(spec),
        hang=parse_hang(spec),
        preflight=parse_preflight(spec),
        providers=tuple(
            map(str, items(interruption.get("providers", list(c.PROVIDERS)), "spec.interruption.providers"))
        ),
        checkpoint_deadline_seconds=integer(
            interruption, "checkpointDeadlineSeconds", "spec.interruption", 25, minimum=1
        ),
        suspend=spec.get("suspend") is True,
        active_deadline_seconds=optional_integer(spec, "activeDeadlineSeconds", "spec", minimum=1),
        ttl_seconds=optional_integer(spec, "ttlSecondsAfterFinished", "spec", minimum=0),
    )


def _processes(workers: Json, pod_spec: Json) -> int:
    name = trainer_container(pod_spec)
    trainer = next(container for container in pod_spec["containers"] if container["name"] == name)
    return processes(workers.get("processesPerWorker"), trainer, "spec.workers.processesPerWorker")


def _ignores_remediation(spec: Json) -> bool:
    path = "spec.nodeRemediation"
    value = mapping(spec.get("nodeRemediation", {}), path)
    return choice(value, "policy", path, (c.ALLOW, c.IGNORE), c.ALLOW) == c.IGNORE
