"""Resources drawn from the CRD.

What it types is drawn within its bounds. What it leaves to the API server's judgement of the pod
(``x-kubernetes-preserve-unknown-fields``) is a pod's value with parts of it exchanged, or junk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

Json = dict[str, Any]
SCHEMA = yaml.safe_load((Path(__file__).parents[3] / "crds" / "holdfast.dev_faulttolerantjobs.yaml").read_text())
SPEC = SCHEMA["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

EXPRESSION = {"key": "kind", "operator": "In", "values": ["gpu"]}
TERMS = {"nodeSelectorTerms": [{"matchExpressions": [EXPRESSION], "matchFields": [EXPRESSION]}]}
AWAY = {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app": "x"}, "matchExpressions": [EXPRESSION]}}
# What the operator itself reads of a pod's spec, as a user would write it.
POD: Json = {
    "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 1}},
    "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}],
    "restartPolicy": "Always",
    "overhead": {"cpu": "10m"},
    "nodeSelector": {"kubernetes.io/hostname": "node-1"},
    "affinity": {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": TERMS},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [AWAY]},
    },
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}],
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "terminationGracePeriodSeconds": 30,
    "imagePullSecrets": [{"name": "pull"}],
    "resourceClaims": [{"name": "gpu"}],
    "envFrom": [{"secretRef": {"name": "keys"}}],
    "hostNetwork": True,
}
AMOUNTS = (
    "NaN",
    "-NaN",
    "sNaN",
    "Infinity",
    "-1",
    "1e999999",
    "1e-999999",
    "9" * 64,
    "1e99999999999999999999",
    "1Ki",
    "²",
    "9" * 5000,
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
JUNK = st.recursive(
    SCALARS | st.sampled_from(AMOUNTS),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from((*POD, "cpu", "name")), inner, max_size=2)
    ),
    max_leaves=4,
)


@st.composite
def spoiled(draw: st.DrawFn, value: Any) -> Any:
    """The same with some parts exchanged for junk."""
    if draw(st.integers(0, 7)) == 0:
        return draw(JUNK)
    if isinstance(value, dict):
        return {key: draw(spoiled(item)) for key, item in value.items()}
    if isinstance(value, list):
        return [draw(spoiled(item)) for item in value]
    return value


def values(schema: Json, name: str = "") -> st.SearchStrategy[Any]:
    """What this part of the schema takes. Fields that take anything are often left out."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from((1, 4096, "1", "1.5Gi", "2e3", "1m", "999999Ei"))
    match schema.get("type"):
        case "integer":
            return st.integers(schema.get("minimum", 0), min(schema.get("maximum", 2**31 - 1), 2**31 - 1))
        case "boolean":
            return st.booleans()
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True).map(lambda text: text[: schema["maxLength"]])
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 9), 9))
        case "array":
            return _arrays(schema)
        case "object":
            return _objects(schema)
    return spoiled(POD[name]) if name in POD else JUNK


def refused(name: str, part: Json) -> bool:
    """Fields of a pod that the schema types only to refuse them by a rule of its own."""
    return name in ("nodeName", "schedulingGates", "restartPolicy") and "type" in part


def _arrays(schema: Json) -> st.SearchStrategy[Any]:
    keys = schema.get("x-kubernetes-list-map-keys")
    unique = (lambda item: tuple(item[key] for key in keys)) if keys else repr
    most = min(schema.get("maxItems", 3), 3)
    return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=most, unique_by=unique)


def _objects(schema: Json) -> st.SearchStrategy[Any]:
    parts = {name: part for name, part in schema.get("properties", {}).items() if not refused(name, part)}
    known = {name: values(part, name) for name, part in parts.items()}
    if "additionalProperties" in schema:
        return st.dictionaries(st.text(min_size=1, max_size=4), values(schema["additionalProperties"]), max_size=2)
    wanted = set(schema.get("required", ()))
    free = {name for name, part in parts.items() if len(part) <= 2 and name not in POD}
    typed = st.fixed_dictionaries(
        {name: strategy for name, strategy in known.items() if name in wanted},
        optional={name: strategy for name, strategy in known.items() if name not in wanted | free},
    )
    if not free:
        return typed
    # What the operator hands on unread: now and then one of them.
    other = st.none() | st.none() | st.tuples(st.sampled_from(sorted(free)), JUNK)
    return st.builds(lambda known, one: {**known, **dict([one] if one else [])}, typed, other)


SPECS = values(SPEC)
