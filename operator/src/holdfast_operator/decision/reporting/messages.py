"""The text of conditions and events. No code reads it back: causes and reasons are enums (``api.reasons``).

Each function is one message: what happened, why, what to do. ``messages.golden`` in the tests lists all of them.
Details, such as what is wrong with a field or a pod, come from where they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_operator.api import names as c

_CERTAIN = (
    "If you are certain that the machine is off, delete its Node object or taint it with"
    " node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
)


def count(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it belongs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# Workers that are lost or leave


def node_lost(pod: str, node: str) -> str:
    return f"Pod {pod} lost: node {node} stopped reporting"


def pod_unreachable(pod: str, node: str, seconds: float) -> str:
    return (
        f"Pod {pod} is unreachable: node {node} is Ready, but peers and operator have not heard from the pod for"
        f" {seconds:.0f} s"
    )


def launcher_unresponsive(pod: str, seconds: float) -> str:
    return f"Launcher in {pod} is unresponsive: no status update for {seconds:.0f} s"


def pod_disrupted(pod: str, reason: str, note: str = "") -> str:
    return f"Pod {pod} is being disrupted: {reason}" + (f": {note}" if note else "")


def pod_deleted(pod: str) -> str:
    return f"Pod {pod} was deleted by another client"


def oom_killed(pod: str) -> str:
    return f"Pod {pod} exceeded its memory limit"


def pod_evicted(pod: str, node: str, failure: str) -> str:
    return f"The kubelet of {node} evicted {pod} for exceeding a limit of its own: {failure}"


def pod_refused(pod: str, node: str, failure: str, help_text: str) -> str:
    return f"The kubelet of {node or 'the node'} refused {pod}: {failure or 'it gave no reason'}; {help_text}"


def pod_refused_avoiding(message: str, minutes: float) -> str:
    return f"{message}. The job places no worker there for {minutes:.0f} min"


def init_container_failed(pod: str, failure: str) -> str:
    return f"Pod {pod} cannot start: {failure}"


def drained(pod: str) -> str:
    return f"Pod {pod} drained after a coordinated checkpoint"


def worker_completed(pod: str) -> str:
    return f"Worker {pod} completed"


def exit_status_unknown(pod: str) -> str:
    return f"Pod {pod} exited while its node or container runtime was down; exit status unknown"


def exited(pod: str, code: int, text: str = "") -> str:
    how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
    return f"Pod {pod} ended with {how}" + (f": {text}" if text else "")


def command_missing(pod: str, detail: str) -> str:
    return (
        f"The trainer's command cannot be started in {pod}{detail}. Its image must have the holdfast package on its"
        " PATH; the command is `holdfast run -- python train.py …` (or torchrun, with rendezvous.backend)"
    )


def container_failed(pod: str, detail: str) -> str:
    return f"The trainer container of {pod} cannot be started{detail}"


def interruption_notice(source: str, node: str, pod: str, reason: str) -> str:
    return f"{source} interruption notice for node {node} (pod {pod}): {reason}"


def node_leaving(node: str, pod: str, taint: str) -> str:
    return f"Node {node} (pod {pod}) has taint {taint} and is being removed"


def node_remediated(node: str, pod: str, message: str) -> str:
    return f"Node {node} (pod {pod}) is being taken out of service: {message}"


def node_cordoned(node: str, pod: str) -> str:
    return f"Moving {pod}: node {node} is cordoned and another node has capacity"


def spare_lost(message: str) -> str:
    return f"Spare worker (not part of training): {message}"


def waiting_for_lost_worker(pods: Sequence[str]) -> str:
    return f"Waiting for {', '.join(pods)} to return or be fenced before replacing it (onFailure: Wait)"


def surplus() -> str:
    return "More workers than requested"


def rendezvous_host_lost(pod: str) -> str:
    return f"{pod} hosted the store by which the workers find each other and is leaving: all workers start again"


def waiting_for_rendezvous_host(pod: str, node: str = "") -> str:
    where = f" on {node}" if node else ""
    return (
        f"{pod}{where} hosted the store of the rendezvous and may still be training with others. New workers are"
        f" created when it is fenced. {_CERTAIN}"
    )


def waiting_for_service() -> str:
    return "The Service of the rendezvous is being created"


def pods_relabelled(pods: str) -> str:
    return (
        f"A label or the owner reference of {pods} was removed or changed, which hides a running pod from the"
        " operator and from the job's Service. No pod was stopped, and the operator restores them. Exclude pods with"
        f" the label {c.LABEL_APP_MANAGED_BY}={c.MANAGED_BY} from what changed them"
    )


# Incidents and decisions


def resumed(seconds: float, reason: str, *, launched: bool, lost_steps: int | None = None, origin: str = "") -> str:
    lost = f", {count(lost_steps, 'step')} lost" if lost_steps is not None else ""
    state = f", state from: {origin}" if origin else ""
    what = "Training resumed" if launched else "Workers are running again"
    return f"{what} {seconds:.1f} s after {reason}{lost}{state}"


def budget_exceeded(incidents: int, cause: str, span: str, limit: int, last: str = "") -> str:
    more = f". Last incident: {last}" if last else ""
    return f"Restart budget exceeded: {incidents} {cause} incidents in {span} (limit {limit}){more}"


def repeat_offender(node: str, failures: int, hours: float) -> str:
    return f"Node {node} failed this job {count(failures, 'time')}; the job places no worker there for {hours:.1f} h"


def repeat_offender_still_used(node: str, failures: int) -> str:
    return (
        f"Node {node} failed this job {count(failures, 'time')}; keeping the node because no other node has capacity"
    )


# Gangs and capacity


def gang_timeout(missing: int, workers: int, seconds: int, retry_seconds: int) -> str:
    return (
        f"{missing} of {workers} workers were not scheduled within {seconds} s; gang cancelled, retrying in"
        f" {retry_seconds} s"
    )


def gang_shrunk(missing: int, workers: int, seconds: int) -> str:
    return (
        f"{missing} of {workers} workers were not scheduled within {seconds} s; replacing them, the others continue"
    )


def queue_timeout(missing: int, workers: int, queue: str, seconds: int, retry_seconds: int) -> str:
    return (
        f"{missing} of {workers} workers were not admitted by {queue} within {seconds} s; gang cancelled, retrying in"
        f" {retry_seconds} s"
    )


def waiting_for_retry() -> str:
    return "Gang could not be scheduled; waiting to retry"


def waiting_for_pods() -> str:
    return "The pods of the gang are being created"


def waiting_for_capacity(placed: int, workers: int, domain: str = "", on_demand: int = 0, others: int = 0) -> str:
    where = f" with one {domain}" if domain else ""
    steady = f", of which {on_demand} must not be on spot capacity (onDemandReplicas)" if on_demand else ""
    beside = f" in addition to {count(others, 'worker')} of jobs that go first" if others else ""
    return f"Cluster has capacity for {placed} of {workers} workers{where}{steady}{beside}; they start together"


def not_admitted(admitted: int, workers: int, queue: str, *, hint: bool) -> str:
    more = f" (Kueue, with its integration of pods, removes {c.QUEUE_GATE} from admitted pods)" if hint else ""
    return f"{admitted} of {workers} workers are admitted by {queue}; they start together{more}"


def waiting_for_gates(pod: str, gates: Sequence[str]) -> str:
    return f"Pod {pod} is waiting for {', '.join(gates)} to be removed"


def scheduling(waiting: int, workers: int, preempting: int = 0) -> str:
    until = f", {preempting} of them until pods of lower priority have left" if preempting else ""
    return f"{waiting} of {workers} workers are waiting for a node{until}"


def started_with_fewer(size: int, workers: int) -> str:
    return f"Cluster has capacity for {size} of {workers} workers; starting with {size}, the rest join later"


def domain_empty(domain: str) -> str:
    return f"No worker of the job is left in {domain}"


def avoided_nodes_healthy() -> str:
    return "Previously avoided nodes are healthy again"


def scaling_up(workers: int, most: int) -> str:
    return f"Scaling up to {workers} workers (elasticity.maxReplicas: {most})"


def capacity_yielded(workers: int) -> str:
    return f"Removing {count(workers, 'worker')} above workers.replicas: another job is waiting for capacity"


# Workers that cannot start


def image_pull_failed(container: str, pod: str, failure: str) -> str:
    return f"The image of container {container} in {pod} cannot be pulled: {failure}"


def container_not_created(container: str, pod: str, failure: str) -> str:
    return f"Container {container} of {pod} cannot be created: {failure}"


def container_crashes(container: str, pod: str, failure: str) -> str:
    return f"Container {container} of {pod} keeps exiting before the trainer starts: {failure}"


def volume_failed(pod: str, note: str) -> str:
    return f"A volume of {pod} cannot be used: {note}"


def volume_missing(pod: str, note: str) -> str:
    return f"Pod {pod} is waiting for a volume: {note}"


def pod_start_failed(pod: str, node: str, note: str) -> str:
    return f"Pod {pod} does not start on {node}: {note}"


def unschedulable(pod: str, note: str) -> str:
    return f"Pod {pod} is unschedulable: {note}"


def no_scheduler_response(pod: str, scheduler: str) -> str:
    return f'Pod {pod} is unscheduled and no scheduler has reported on it; is scheduler "{scheduler}" running?'


def unscheduled(pod: str, reason: str, note: str) -> str:
    return f"Pod {pod} is unscheduled: {reason}: {note}"


def no_launcher(pods: str) -> str:
    return (
        f"{pods}: trainer is running, but no Holdfast launcher has reported. Its command must begin with"
        " `holdfast run` (`holdfast run -- python train.py …`)"
    )


def no_sidecar(pods: str) -> str:
    return f"{pods}: trainer is running, but its sidecar does not report: see the log of holdfast-sidecar"


def image_pulling(pod: str, note: str) -> str:
    return f"{pod}: {note}"


def start_deadline(message: str, seconds: int) -> str:
    return f"{message} (for {seconds} s, startupDeadlineSeconds)"


# State of the job


def no_recovery() -> str:
    return "No recovery in progress"


def all_training() -> str:
    return "All requested workers are training"


def training(workers: int, requested: int, *, launched: bool) -> str:
    verb = _verb(launched=launched)
    if workers > requested:
        return f"{workers} workers {verb} ({requested} requested)"
    return f"{workers} of {requested} workers {verb}"


def fewer_training(workers: int, requested: int, *, launched: bool) -> str:
    return f"{workers} of {requested} workers {_verb(launched=launched)}; replacements are on the way"


def _verb(*, launched: bool) -> str:
    """Only Holdfast's launchers report whether the workers train."""
    return "are training" if launched else "are running"


def starting(phases: Sequence[str]) -> str:
    return "Workers are starting" + (f"; launchers report {'; '.join(phases)}" if phases else "")


def recovering() -> str:
    return "Workers are forming the next world"


def spares_ready(ready: int, spares: int) -> str:
    return f"{ready} of {spares} spares are on standby"


def no_volume() -> str:
    return "checkpoint.volume is not set; checkpoints are lost with the pods"


def invalid_spec(detail: str) -> str:
    return f"Spec not understood by this operator version: {detail}"


def unsuspended() -> str:
    return "The job is no longer suspended"


def suspended() -> str:
    return "The job is suspended"


def deadline_exceeded(seconds: int) -> str:
    return f"The job was active for {seconds} s (activeDeadlineSeconds)"


def completed(step: int | None) -> str:
    return "Training is complete" + (f" at step {step}" if step is not None else "")


def checkpoint_quarantined(path: str, reason: str) -> str:
    return f"Checkpoint {path} is corrupt and was set aside: {reason}"


# Membership


def known_twice(pods: Sequence[str], generation: int) -> str:
    return f"{', '.join(pods)} received two different publications of generation {generation}"


def waiting_for_all(ready: int, workers: int) -> str:
    return f"{ready} of {workers} workers are ready; waiting for all"


def waiting_for_starting(pods: str) -> str:
    return f"{pods} is ready; waiting briefly for other starting workers"


def up_to_date(generation: int) -> str:
    return f"Generation {generation} is up to date"


def awaiting_fence(pods: Sequence[str], generation: int) -> str:
    return (
        f"{', '.join(pods)} of generation {generation} may still be running. Training resumes when they report or are"
        f" fenced. {_CERTAIN}"
    )


def foreign_claim(job_uid: str, publication: str, generation: int) -> str:
    return (
        f"The checkpoint folder has a claim of job {job_uid}, publication {publication}, at generation {generation}"
    )


def newer_generation(reported: int, recorded: int) -> str:
    return (
        f"Workers report generation {reported}, but the status has {recorded}: was the status restored from a backup?"
    )


def other_publication(pod: str, generation: int, theirs: str, ours: str) -> str:
    return f"{pod} is training in generation {generation} of publication {theirs}, but the status has {ours}"


def ready(workers: int, requested: int) -> str:
    if workers == requested:
        return f"All {workers} workers are ready"
    return f"{workers} of {requested} workers are ready"


def ready_without_others(workers: int, requested: int) -> str:
    return f"{ready(workers, requested)}; the others are unschedulable"


def ready_in_time(workers: int, requested: int, seconds: float) -> str:
    return f"{ready(workers, requested)} after {seconds:.0f} s"


def pods_ready(pods: str) -> str:
    return f"{pods} is ready"


def pods_returned(pods: str) -> str:
    return f"{pods} of the last active generation reports again"


def waiting_for_checkpoint(pods: str) -> str:
    return f"{pods} is ready; waiting for the end of a checkpoint"


def waiting_for_replacement(seconds: float) -> str:
    return f"Waiting up to {seconds:.0f} s for a replacement (shrinkAfterSeconds)"


def scaled_down(before: int, after: int) -> str:
    return f"Scaled down from {before} to {count(after, 'worker')}"


def none_reports() -> str:
    return "No worker of the last generation reports"


def workers_missing(missing: int) -> str:
    return f"{count(missing, 'worker')} missing"


def loss_not_agreed() -> str:
    return "The reporting workers still reach the silent ones"


def survivors_continue(workers: int, before: int) -> str:
    return f"{workers} of {before} workers continue"


def too_few_ready(ready_workers: int, minimum: int, step: int) -> str:
    steps = f" in steps of {step}" if step > 1 else ""
    return f"{count(ready_workers, 'worker')} ready; a world needs at least {minimum}{steps}"


def generation_published(generation: int, why: str, pods: Sequence[str]) -> str:
    return f"Generation {generation}: {why} ({', '.join(pods)})"


# Decisions


def decision(action: str, why: str) -> str:
    return f"{action}: {why}"


def rule_matches(rule: str, facts: str, *, counts: bool) -> str:
    return f"rule {rule} matches {facts}" + ("" if counts else "; not counted towards any budget")


def no_rule(why: str) -> str:
    return f"no rule matches; {why}"


def node_kept(error: str, why: str) -> str:
    return f"{error}; keeping the node because no other node has capacity; {why}"


def in_place() -> str:
    return "the launchers continue in the existing pods"


def replaced(pod: str, avoided_node: str = "") -> str:
    return f"a new pod replaces {pod}" + (f" on another node than {avoided_node}" if avoided_node else "")


def escalated(action: str, times: int, scope: str, seconds: int) -> str:
    return f"{action} was tried {count(times, 'time')} for {scope} within {seconds} s"


def symptom_elsewhere(pod: str, why: str, counted_with: str) -> str:
    return f"{pod}: {why}; counted with {counted_with}"


def gpu_error(pod: str, error: str) -> str:
    return f"GPU error in {pod}: {error}"


def pod_condition(pod: str, kind: str, status: str, reason: str = "") -> str:
    return f"Pod {pod} has the condition {kind} {status}" + (f": {reason}" if reason else "")


# Preflight


def preflight_failed(pod: str, node: str, checks: str) -> str:
    return f"{pod} failed its preflight on {node}: {checks}"


def not_reached(pods: str) -> str:
    return f"not reached by {pods}"


def preflight_of_job(failed: str) -> str:
    return f"{failed}; this is not a node problem. New pods read a changed Secret: delete the waiting ones"


def preflight_on_every_node(failed: str) -> str:
    return f"{failed}; the check fails on every node, so no node is avoided"


def preflight_without_other_node(failed: str) -> str:
    return (
        f"{failed}; no other node has capacity: repair the node, add another one, or set preflight.onFailure to"
        " Ignore"
    )


def preflight_fails_job(failed: str) -> str:
    return f"{failed} (preflight.onFailure: Fail)"


def preflight_ignored(failed: str) -> str:
    return f"{failed}; joining anyway (preflight.onFailure: Ignore)"


def preflight_avoids_node(failed: str, hours: float) -> str:
    return f"{failed}; moving to another node, and the job places no worker there for {hours:.0f} h"


# Suspension and checkpoints


def suspending(workers: int, *, launched: bool) -> str:
    how = "after a coordinated checkpoint" if launched else "on SIGTERM, within their grace period"
    verb = "is" if workers == 1 else "are"
    return f"{count(workers, 'worker')} {verb} leaving {how}"


def no_worker_left(why: str) -> str:
    return f"No worker is left; {why}"


def script_resumes() -> str:
    return "the script decides from where it resumes (rendezvous.backend)"


def newest_checkpoint(step: int) -> str:
    return f"the newest known checkpoint is of step {step}"


def never_trained() -> str:
    return "the job has not trained yet"


def starts_over() -> str:
    return "checkpoint.volume is not set, so the job will start from step 0"


def no_checkpoint() -> str:
    return "no checkpoint is known"


def resumes_from(step: int, *, suspended_before: bool) -> str:
    where = "" if suspended_before else " in the job's folder (checkpoint.resume: Always)"
    return f"Training resumes from the checkpoint of step {step}{where}"


def starts_without_checkpoint() -> str:
    return "Training starts at step 0: no checkpoint exists"


def starts_by_request() -> str:
    return (
        "Training starts at step 0 (checkpoint.resume: Never); checkpoints of earlier jobs stay in the job's folder"
        " and are neither read nor deleted"
    )


def checkpoints_failing(since: str, cause: str, error: str, step: int, fix: str) -> str:
    return (
        f"No checkpoint could be written since {since} ({cause}): {error}. Training continues, but resumes from step"
        f" {step} if all workers are lost: {fix}"
    )


def events_suppressed(message: str, more: int) -> str:
    return f"{message} ({more} more events suppressed)"


# Nodes under remediation


def alert_before_node(why: str) -> str:
    return (
        f"{why}: the alert began before this node was created, so it is about an earlier machine of this name; no"
        " action taken unless it begins again"
    )


def only_observed(why: str) -> str:
    return f"{why}; no action taken (mode Observe)"


def blocked(why: str, mode: str, reason: str) -> str:
    return f"{why}; {mode} blocked: {reason}"


def dry_run(why: str, mode: str) -> str:
    return f"{why}; {mode} would be done (dryRun)"


def cordoned(why: str, mode: str) -> str:
    return f"{why}; the node is cordoned, mode {mode}"


def mark_unreadable() -> str:
    return "its mark cannot be read; remove the annotation holdfast.dev/remediation"


def control_plane() -> str:
    return "nodes of the control plane are never acted on"


def not_selected() -> str:
    return "nodeSelector excludes it"


def cordoned_by_others() -> str:
    return "another client cordoned it"


def cooling_down() -> str:
    return "node is cooling down (cooldownSeconds)"


def max_unavailable(limit: int, nodes: int) -> str:
    return f"maxUnavailable reached ({limit} of {nodes} nodes)"


def max_per_hour(limit: int) -> str:
    return f"maxPerHour reached ({limit})"


def stale_mark() -> str:
    return "The node has a mark of an earlier setting; uncordon the node when it is healthy"


def replacing(why: str) -> str:
    return f"{why}; its machine is being replaced"


def uncordoned_externally(why: str) -> str:
    return f"{why}; another client uncordoned the node: no action taken while the alert lasts"


def alert_unheard(why: str, hours: int, node: str) -> str:
    return (
        f"{why}; Alertmanager has reported nothing about it for {hours} h, as when an alert is silenced. No further"
        f" action; the node stays cordoned. If it is healthy: kubectl uncordon {node}"
    )


def gpu_needs_reset() -> str:
    return "its GPU needs a reset, so that proves nothing; the node is uncordoned after a reboot"


def not_ready() -> str:
    return "the node is uncordoned once it is Ready"


def gpus_missing(gpus: int, expected: int) -> str:
    return f"it has {gpus} of {expected} GPUs; the node is uncordoned once it has all"


def alerts_resolved() -> str:
    return "alerts resolved"


def rebooted() -> str:
    return "the node has booted since"


def alerts_silent() -> str:
    return "nothing is reported about its alerts any more"


def released(why: str, reason: str) -> str:
    return f"{why}: {reason}; the node takes pods again"


def uncordon_yourself(why: str) -> str:
    return f"{why}: alerts resolved; uncordon the node when it is healthy"


def uncordon_later(why: str, reason: str, node: str) -> str:
    return f"{why}: alerts resolved, but {reason}, or when you do it: kubectl uncordon {node}"


def uncordon_soon(why: str) -> str:
    return f"{why}: alerts resolved; the node is uncordoned if they stay resolved"


def drain_waits(why: str, pods: str) -> str:
    return f"{why}; waiting for {pods}"


def drain_incomplete(why: str, pods: str) -> str:
    return f"{why}; still there past the deadline: {pods}"


def draining(why: str) -> str:
    return f"{why}; the node is being drained"


def node_drained(why: str) -> str:
    return f"{why}; the node is drained and stays cordoned"
