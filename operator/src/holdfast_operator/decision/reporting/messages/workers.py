"""Workers that are lost, leave or wait for a rendezvous."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_operator.api import names as c
from holdfast_operator.decision.reporting.messages.common import CERTAIN


def node_lost(pod: str, node: str) -> str:
    return f"Pod {pod} lost: node {node} stopped reporting"


def pod_unreachable(pod: str, node: str, seconds: float) -> str:
    return (
        f"Pod {pod} is unreachable: node {node} is Ready, but neither peers nor operator have received anything from"
        f" the pod for {seconds:.0f} s"
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
        f" created when it is fenced. {CERTAIN}"
    )


def waiting_for_service() -> str:
    return "The Service of the rendezvous is being created"


def pods_relabelled(pods: str) -> str:
    return (
        f"A label or the owner reference of {pods} was removed or changed, which hides a running pod from the"
        " operator and from the job's Service. No pod was stopped, and the operator restores them. Exclude pods with"
        f" the label {c.LABEL_APP_MANAGED_BY}={c.MANAGED_BY} from what changed them"
    )
