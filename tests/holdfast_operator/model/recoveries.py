"""Every ``spec.recovery`` that the schema lets pass, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import CAUSES, LADDER, RULE_ACTIONS

CODES = st.lists(st.integers(1, 255), min_size=1, max_size=4, unique=True)
ASKED: dict[str, Any] = {
    "onExitCodes": st.fixed_dictionaries({"operator": st.sampled_from(("In", "NotIn")), "values": CODES}),
    "onSignals": st.lists(st.sampled_from(("SIGSEGV", "SIGKILL", "SIGSYS")), min_size=1, max_size=3, unique=True),
    "onOOM": st.sampled_from(c.OOM_SCOPES),
    "onPodConditions": st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(("DisruptionTarget", "Ready"))},
            optional={"status": st.sampled_from(("True", "False", "Unknown")), "reason": st.text(min_size=1)},
        ),
        min_size=1,
        max_size=3,
    ),
    "onGpuErrors": st.fixed_dictionaries({"xids": CODES}, optional={"kinds": st.just(["Xid"])}),
    "onHang": st.just(True),
}
RULES = st.lists(
    st.fixed_dictionaries(
        {"name": st.from_regex(r"[a-z0-9]{1,9}", fullmatch=True), "action": st.sampled_from(RULE_ACTIONS)},
        optional={"cause": st.sampled_from(CAUSES), **ASKED},
    ),
    max_size=6,
    unique_by=lambda value: value["name"],
)
LADDERS = st.lists(st.sampled_from(LADDER), min_size=2, unique=True).map(
    lambda found: sorted(found, key=LADDER.index)
)
RECOVERIES = st.fixed_dictionaries(
    {},
    optional={
        "rules": RULES,
        "escalation": st.fixed_dictionaries(
            {"actions": LADDERS},
            optional={"failures": st.integers(1, 20), "windowSeconds": st.integers(60, 2592000)},
        ),
        "avoidRepeatOffenders": st.integers(0, 10),
        "backoff": st.fixed_dictionaries(
            {"initialSeconds": st.integers(0, 3600), "maxSeconds": st.just(3600)},
            optional={"jitterPercent": st.integers(0, 100)},
        ),
        "budgets": st.lists(
            st.fixed_dictionaries(
                {"cause": st.sampled_from(CAUSES), "maxRestarts": st.integers(0, 9)},
                optional={"windowSeconds": st.integers(60, 2592000)},
            ),
            max_size=4,
            unique_by=lambda value: value["cause"],
        ),
    },
)
