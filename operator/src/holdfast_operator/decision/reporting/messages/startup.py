"""Workers that cannot start."""

from __future__ import annotations


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
