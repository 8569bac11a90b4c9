"""Reports for workers without a launcher (``rendezvous.backend`` other than Holdfast). Pure.

Such a worker does not report, so the state of its container counts: it is ready while it runs, and all running
members of the generation form the world. Whether the script trains, and how far, is unknown. Notices and GPU errors
are the sidecar's own and stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.job import Job
from holdfast_operator.api.status import Phase, Status
from holdfast_operator.views import PodView, Report, World

RUNNING = "Running"


def spoken_for(job: Job, status: Status, pods: Iterable[PodView], reports: Iterable[Report]) -> tuple[Report, ...]:
    """Complete the sidecars' reports as launchers would. Reports with launchers stay unchanged."""
    reports = tuple(reports)
    if job.spec is None or job.spec.launched:
        return reports
    views = {view.uid: view for view in pods}
    world, lost = _world(status, views)
    return tuple(_completed(report, views[report.pod_uid], world, lost) for report in reports)


def _completed(report: Report, pod: PodView, world: World | None, lost: tuple[str, ...]) -> Report:
    within = world if world is not None and pod.uid in world.members and _runs(pod) else None
    return replace(
        report,
        has_launcher=True,
        silent_seconds=None,
        ready=_runs(pod),
        world=within,
        started=within.attempt_id if within else None,
        accepted=within.attempt_id if within else None,
        phase=RUNNING if within else "",
        # An incident that ended before is over as soon as a world without the lost worker runs.
        committed_at=report.received_at if within else None,
        lost_members=lost if within else (),
    )


def _world(status: Status, pods: dict[str, PodView]) -> tuple[World | None, tuple[str, ...]]:
    """Return the world of the running members, and the lost members.

    Members are only lost, so the attempt number increases with each.
    """
    membership = status.membership
    wanted = {worker.pod_uid for worker in status.in_phase(Phase.WANTED, Phase.LEAVING)}
    done = {worker.pod_uid for worker in status.in_phase(Phase.ENDED) if worker.done}
    uids = tuple(member.pod_uid for member in sorted(membership.members, key=lambda member: member.index))
    left = tuple(uid for uid in uids if uid in done or (uid in wanted and uid in pods and _lives(pods[uid])))
    lost = tuple(uid for uid in uids if uid not in left)
    if not any(uid in pods and _runs(pods[uid]) for uid in left):
        return None, lost
    attempt_id = AttemptId(generation=membership.generation, attempt=1 + len(lost))
    return World(attempt_id=attempt_id, publication=membership.publication, members=left, coordinator=left[0]), lost


def _lives(pod: PodView) -> bool:
    return not pod.absent and (pod.exit is None or (pod.exit.code == 0 and not pod.leaving))


def _runs(pod: PodView) -> bool:
    return pod.running_since is not None and not pod.absent
