"""The state of a job, all of which the resource's status holds.

Each type parses itself from JSON (``from_json`` drops what it cannot read and keeps the rest) and serializes itself
(``to_json``). Nothing else survives a restart of the operator, and nothing else is needed.
"""

from holdfast_operator.api.status.conditions import MOST_TELLING, Condition, ConditionType, StartupProblem
from holdfast_operator.api.status.failure_history import Divergence, Divergences
from holdfast_operator.api.status.goodput import Goodput
from holdfast_operator.api.status.incidents import Incident, IncidentCount, reason_word, say
from holdfast_operator.api.status.membership import Claim, EarlierGeneration, Member, Membership
from holdfast_operator.api.status.placement import AvoidedNode, GangAttempt
from holdfast_operator.api.status.progress import Checkpoint, Progress, StartingPoint
from holdfast_operator.api.status.status import Status
from holdfast_operator.api.status.workers import Phase, Worker

__all__ = [
    "MOST_TELLING",
    "AvoidedNode",
    "Checkpoint",
    "Claim",
    "Condition",
    "ConditionType",
    "Divergence",
    "Divergences",
    "EarlierGeneration",
    "GangAttempt",
    "Goodput",
    "Incident",
    "IncidentCount",
    "Member",
    "Membership",
    "Phase",
    "Progress",
    "StartingPoint",
    "StartupProblem",
    "Status",
    "Worker",
    "reason_word",
    "say",
]
