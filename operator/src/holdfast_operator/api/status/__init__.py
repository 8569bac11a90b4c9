"""What the operator remembers of a job, all of it in the resource's status.

Each type reads itself back from JSON (``from_json`` drops what it cannot read and keeps the rest) and writes
itself (``to_json``). Nothing else survives a restart of the operator, and nothing else is needed.
"""

from holdfast_operator.api.status.conditions import Condition, Trouble
from holdfast_operator.api.status.goodput import Goodput
from holdfast_operator.api.status.incidents import Count, Incident, reason_word, say
from holdfast_operator.api.status.membership import Member, Membership, Previous
from holdfast_operator.api.status.placement import AvoidedNode, Gang
from holdfast_operator.api.status.progress import Checkpoint, Origin, Progress
from holdfast_operator.api.status.status import Status
from holdfast_operator.api.status.workers import Phase, Worker

__all__ = [
    "AvoidedNode",
    "Checkpoint",
    "Condition",
    "Count",
    "Gang",
    "Goodput",
    "Incident",
    "Member",
    "Membership",
    "Origin",
    "Phase",
    "Previous",
    "Progress",
    "Status",
    "Trouble",
    "Worker",
    "reason_word",
    "say",
]
