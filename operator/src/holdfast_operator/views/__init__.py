"""What one pass sees: a frozen snapshot, parsed once from the API's and the agents' JSON.

Nothing here reads a cluster or a clock; ``observe.py`` does, and fills ``Observed``.
"""

from holdfast_operator.decision.snapshot import (
    CreationError,
    GangPriority,
    Installation,
    NodeUsage,
    Observed,
    PodAffinityInfo,
    WaitingGang,
)
from holdfast_operator.views.nodes import NodeView, parse_node
from holdfast_operator.views.pods import Exit, PodView, parse_pod, priority_of
from holdfast_operator.views.renewals import Renewals, read_renewal
from holdfast_operator.views.reports import (
    Check,
    GpuError,
    Notice,
    Preflight,
    Quarantined,
    Report,
    ReportedIncident,
    Restored,
    World,
    parse_report,
)

__all__ = [
    "Check",
    "CreationError",
    "Exit",
    "GangPriority",
    "GpuError",
    "Installation",
    "NodeUsage",
    "NodeView",
    "Notice",
    "Observed",
    "PodAffinityInfo",
    "PodView",
    "Preflight",
    "Quarantined",
    "Renewals",
    "Report",
    "ReportedIncident",
    "Restored",
    "WaitingGang",
    "World",
    "parse_node",
    "parse_pod",
    "parse_report",
    "priority_of",
    "read_renewal",
]
