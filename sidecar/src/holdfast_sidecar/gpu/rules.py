"""GPU errors as data: fields, limits, cause and advice.

The XIDs and their actions are NVIDIA's ("Analyzing Xid Errors with the Xid Catalog", Ampere and newer): a restart of
the application is `InPlace`. A reset of the GPU or the machine is `ReplaceNode`, because a pod can do neither.
`Ignore` means that training may continue. The actions are advice: the operator follows it if no rule of the job
matches.
"""

from dataclasses import dataclass
from typing import Final

APPLICATION: Final = "Application"
INFRASTRUCTURE: Final = "Infrastructure"
IGNORE: Final = "Ignore"
IN_PLACE: Final = "InPlace"
REPLACE_NODE: Final = "ReplaceNode"

XID_KIND: Final = "Xid"
VANISHED_KIND: Final = "Vanished"

# Fields of the exporter.
XID: Final = "DCGM_FI_DEV_XID_ERRORS"
"""The last XID; it stays until another comes."""
XID_WINDOW: Final = "DCGM_EXP_XID_ERRORS_COUNT"
"""XIDs of the last minutes by `xid`, if the exporter is configured to count them."""
XID_TOTAL: Final = "DCGM_EXP_XID_ERRORS_TOTAL"
"""XIDs since the exporter's start by `xid`, in newer exporters. Without any there is no series."""
UTILIZATION: Final = "DCGM_FI_DEV_GPU_UTIL"
MEMORY_USED: Final = "DCGM_FI_DEV_FB_USED"
MEMORY_FREE: Final = "DCGM_FI_DEV_FB_FREE"
MEMORY_RESERVED: Final = "DCGM_FI_DEV_FB_RESERVED"
TEMPERATURE: Final = "DCGM_FI_DEV_GPU_TEMP"
MEMORY_TEMPERATURE: Final = "DCGM_FI_DEV_MEMORY_TEMP"
POWER: Final = "DCGM_FI_DEV_POWER_USAGE"
ENERGY: Final = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
CLOCK: Final = "DCGM_FI_DEV_SM_CLOCK"
SLOWDOWN_TEMPERATURE: Final = "DCGM_FI_DEV_SLOWDOWN_TEMP"
REMAP_FAILURE: Final = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
REMAP_PENDING: Final = "DCGM_FI_DEV_ROW_REMAP_PENDING"
THROTTLE: Final = ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
"""One field; DCGM 4 renamed it."""

LIVENESS_FIELDS: Final = (ENERGY, POWER, TEMPERATURE, UTILIZATION, CLOCK, MEMORY_USED)
"""Some of these values always change on a GPU with power, if energy or power is among them."""

THROTTLE_REASONS: Final = {
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
SLOWED: Final = 0x08 | 0x20 | 0x40 | 0x80
"""Reasons that are a fault. A power cap is normal operation."""

VOLATILE_DOUBLE_BIT: Final = ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",)
"""Uncorrectable memory errors since the driver was loaded. A GPU with such errors needs a reset."""

COUNTERS: Final = {
    "ecc_single_bit": ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL"),
    "ecc_double_bit": ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL"),
    "rows_remapped_correctable": ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",),
    "rows_remapped_uncorrectable": ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",),
    "nvlink_crc_flit": ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",),
    "nvlink_crc_data": ("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",),
    "nvlink_replay": ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",),
    "nvlink_recovery": ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",),
}
"""Counters by our name for them; of several fields the first one that the exporter had."""


@dataclass(frozen=True, kw_only=True)
class XidRule:
    xids: frozenset[int]
    cause: str
    action: str
    words: str


@dataclass(frozen=True, kw_only=True)
class CountRule:
    """A number of new errors within a number of seconds.

    If the number is 1, each error is reported, else each episode once.
    """

    kind: str
    counters: tuple[str, ...]
    at_least: float
    seconds: float
    cause: str
    action: str
    words: str


@dataclass(frozen=True, kw_only=True)
class StateRule:
    """A field that stays at or above a limit, or has some of these bits, for a number of seconds.

    Each episode is reported once.
    """

    kind: str
    fields: tuple[str, ...]
    limit: float = 1.0
    limit_field: str = ""
    """A field with the GPU's own limit, which takes precedence over `limit`."""
    bits: int = 0
    seconds: float = 0.0
    cause: str = INFRASTRUCTURE
    action: str
    words: str


def _xid(*xids: int, cause: str, action: str, words: str) -> XidRule:
    return XidRule(xids=frozenset(xids), cause=cause, action=action, words=words)


XID_RULES: Final = (
    _xid(13, cause=APPLICATION, action=IN_PLACE, words="a kernel did what it may not (graphics engine exception)"),
    _xid(31, cause=APPLICATION, action=IN_PLACE, words="a kernel used an address that is not its own (page fault)"),
    _xid(8, 11, 25, 32, 69, cause=APPLICATION, action=IN_PLACE, words="commands that the GPU cannot carry out"),
    _xid(137, cause=APPLICATION, action=IGNORE, words="an access to a peer's memory over NVLink that is not allowed"),
    _xid(43, cause=APPLICATION, action=IGNORE, words="a process's channel was stopped; the GPU is well"),
    _xid(45, cause="", action=IGNORE, words="a process's channels were removed after another error"),
    _xid(48, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="an uncorrectable (double-bit) memory error"),
    _xid(63, cause=INFRASTRUCTURE, action=IGNORE, words="a bad row of memory was replaced by a spare one"),
    _xid(64, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="a bad row of memory could not be replaced"),
    _xid(92, cause=INFRASTRUCTURE, action=IGNORE, words="many correctable (single-bit) memory errors"),
    _xid(94, cause=INFRASTRUCTURE, action=IN_PLACE, words="an uncorrectable memory error, contained to its process"),
    _xid(95, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="an uncorrectable memory error that was not contained"),
    _xid(140, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="a memory error that the GPU did not recover from"),
    _xid(156, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="a part is to be retired, which takes a reset"),
    _xid(
        157, cause=INFRASTRUCTURE, action=IGNORE, words="a part could not be retired: nothing is left to replace it"
    ),
    _xid(171, 172, cause=INFRASTRUCTURE, action=IGNORE, words="where the memory error of XID 48 was"),
    _xid(74, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="an NVLink error"),
    _xid(136, 155, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="an NVLink did not come up"),
    _xid(
        *range(144, 151),
        cause=INFRASTRUCTURE,
        action=IGNORE,
        words="an NVLink event; the kernel's log shows how serious it is",
    ),
    _xid(79, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="the GPU has fallen off the bus"),
    _xid(46, 62, 109, 110, 158, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="the GPU hangs until it is reset"),
    _xid(119, 120, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="the GPU's own processor (GSP) does not answer"),
    _xid(143, 151, cause=INFRASTRUCTURE, action=REPLACE_NODE, words="the GPU could not be set up"),
    _xid(154, cause="", action=IGNORE, words="the required action for the GPU has changed; see the kernel's log"),
)
UNKNOWN_XID: Final = XidRule(xids=frozenset(), cause="", action=IGNORE, words="an error that is not in the table")

# The chart's alerts have the same limits (charts/holdfast/rules/holdfast.yaml): a test compares them.
COUNT_RULES: Final = (
    CountRule(
        kind="DoubleBitEcc",
        counters=("ecc_double_bit",),
        at_least=1,
        seconds=600,
        cause=INFRASTRUCTURE,
        action=REPLACE_NODE,
        words="uncorrectable (double-bit) memory errors",
    ),
    CountRule(
        kind="SingleBitEcc",
        counters=("ecc_single_bit",),
        at_least=100,
        seconds=3600,
        cause=INFRASTRUCTURE,
        action=IGNORE,
        words="correctable (single-bit) memory errors",
    ),
    CountRule(
        kind="RowsRemapped",
        counters=("rows_remapped_uncorrectable",),
        at_least=1,
        seconds=600,
        cause=INFRASTRUCTURE,
        action=IGNORE,
        words="rows of memory replaced after uncorrectable errors",
    ),
    CountRule(
        kind="NvLinkRecovery",
        counters=("nvlink_recovery",),
        at_least=1,
        seconds=600,
        cause=INFRASTRUCTURE,
        action=IGNORE,
        words="NVLinks that failed and were trained again",
    ),
    CountRule(
        kind="NvLinkReplay",
        counters=("nvlink_replay",),
        at_least=1,
        seconds=600,
        cause=INFRASTRUCTURE,
        action=IGNORE,
        words="NVLink transfers that were made again",
    ),
    CountRule(
        kind="NvLinkErrors",
        counters=("nvlink_crc_flit", "nvlink_crc_data"),
        at_least=30_000,  # DCGM's own limit, 100 per second: links always correct some errors
        seconds=300,
        cause=INFRASTRUCTURE,
        action=IGNORE,
        words="NVLink transfers that arrived corrupt",
    ),
)

STATE_RULES: Final = (
    StateRule(
        kind="RowRemapFailure",
        fields=(REMAP_FAILURE,),
        action=REPLACE_NODE,
        words="bad rows of memory cannot be replaced any more",
    ),
    StateRule(
        kind="RowRemapPending",
        fields=(REMAP_PENDING,),
        action=IGNORE,
        words="a bad row of memory is replaced at the next reset",
    ),
    StateRule(
        kind="Overheated",
        fields=(TEMPERATURE,),
        limit=90.0,
        limit_field=SLOWDOWN_TEMPERATURE,
        seconds=30,
        action=IGNORE,
        words="too hot: it slows down",
    ),
    StateRule(
        kind="Throttled",
        fields=THROTTLE,
        bits=SLOWED,
        seconds=60,
        action=IGNORE,
        words="slowed down by its hardware",
    ),
)

FIELDS: Final = frozenset(
    {
        *(field for fields in COUNTERS.values() for field in fields),
        *(field for rule in STATE_RULES for field in (*rule.fields, rule.limit_field) if field),
        *LIVENESS_FIELDS,
        XID,
        XID_WINDOW,
        XID_TOTAL,
        MEMORY_FREE,
        MEMORY_RESERVED,
        MEMORY_TEMPERATURE,
    }
)
"""All fields that are read from the exporter's text."""


def xid_rule(xid: int) -> XidRule:
    return next((rule for rule in XID_RULES if xid in rule.xids), UNKNOWN_XID)
