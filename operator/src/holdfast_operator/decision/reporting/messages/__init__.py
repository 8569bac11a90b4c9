"""The text of conditions and events. No code reads it back: causes and reasons are enums (``api.reasons``).

Each function is one message: what happened, why, what to do. ``messages.golden`` in the tests lists all of them.
Details, such as what is wrong with a field or a pod, come from where they are read.
"""

from holdfast_operator.decision.reporting.messages import capacity as capacity
from holdfast_operator.decision.reporting.messages import checkpoints as checkpoints
from holdfast_operator.decision.reporting.messages import job as job
from holdfast_operator.decision.reporting.messages import membership as membership
from holdfast_operator.decision.reporting.messages import nodes as nodes
from holdfast_operator.decision.reporting.messages import preflight as preflight
from holdfast_operator.decision.reporting.messages import recovery as recovery
from holdfast_operator.decision.reporting.messages import startup as startup
from holdfast_operator.decision.reporting.messages import workers as workers
