"""What the API server and the agents reported, parsed once into frozen views."""

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
from holdfast_operator.views.usage import NodeUsage, PodAffinityInfo

__all__ = [
    "Check",
    "Exit",
    "GpuError",
    "NodeUsage",
    "NodeView",
    "Notice",
    "PodAffinityInfo",
    "PodView",
    "Preflight",
    "Quarantined",
    "Renewals",
    "Report",
    "ReportedIncident",
    "Restored",
    "World",
    "parse_node",
    "parse_pod",
    "parse_report",
    "priority_of",
    "read_renewal",
]
