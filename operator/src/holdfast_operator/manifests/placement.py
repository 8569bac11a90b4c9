"""The placement of one worker: what placement, ``onDemandReplicas`` and ``hostNetwork`` add to its pod's spec. Pure.

``capacity`` reads required terms like the scheduler, so a gang's gates are never lifted for pods that could not be
placed. Preferences (spread, spot for the others) never delay a pod.
"""

from __future__ import annotations

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.spec.scheduling import Scheduling
from holdfast_operator.manifests.common import Manifest

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def placed(
    pod_spec: Json,
    scheduling: Scheduling,
    *,
    namespace: str,
    job: str,
    on_demand: bool = False,
    spare: bool = False,
    domain: str = "",
    avoid: tuple[str, ...] = (),
    last_resort: tuple[str, ...] = (),
) -> Manifest:
    """Return a copy of the pod spec with all placement constraints of one worker."""
    result = dict(pod_spec)
    affinity = dict(result.get("affinity") or {})
    expressions = _off_spot() if on_demand else []
    if expressions or avoid:
        affinity["nodeAffinity"] = _required(affinity.get("nodeAffinity") or {}, expressions, avoid)
    if last_resort:
        affinity["nodeAffinity"] = _more(affinity.get("nodeAffinity") or {}, _PREFERRED, _rather_not(last_resort))
    if scheduling.on_demand and not on_demand:
        affinity["nodeAffinity"] = _preferring_spot(affinity.get("nodeAffinity") or {})
    if scheduling.exclusive_nodes:
        terms = _no_other_job(namespace, job)
        affinity["podAntiAffinity"] = _more(affinity.get("podAntiAffinity") or {}, _REQUIRED, terms)
    if in_host_network(pod_spec):
        affinity["podAntiAffinity"] = _more(affinity.get("podAntiAffinity") or {}, _REQUIRED, [_no_worker()])
    if spare:
        terms = [{"weight": 100, "podAffinityTerm": _beside_own(job)}]
        affinity["podAntiAffinity"] = _more(affinity.get("podAntiAffinity") or {}, _PREFERRED, terms)
    if affinity:
        result["affinity"] = affinity
    if domain:
        result["nodeSelector"] = {**(result.get("nodeSelector") or {}), scheduling.packed_by: domain}
    if scheduling.spread_by:
        given = result.get("topologySpreadConstraints") or []
        result["topologySpreadConstraints"] = [*given, _spread(scheduling.spread_by, job)]
    return result


def _off_spot() -> list[Manifest]:
    return [{"key": key, "operator": "NotIn", "values": [value]} for key, value in c.SPOT_LABELS]


def _required(node_affinity: Json, expressions: list[Manifest], avoid: tuple[str, ...]) -> Manifest:
    """Return each alternative with these expressions, and with these nodes excluded."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoid]
    required = dict(node_affinity.get(_REQUIRED) or {})
    required["nodeSelectorTerms"] = [
        _more(_more(term, "matchExpressions", expressions), "matchFields", fields)
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    return {**node_affinity, _REQUIRED: required}


def _rather_not(nodes: tuple[str, ...]) -> list[Manifest]:
    """Return a preference against nodes that may go soon, stronger than any other."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    return [{"weight": 100, "preference": {"matchFields": fields}}]


def _preferring_spot(node_affinity: Json) -> Manifest:
    """Return a preference for spot capacity, for workers that may be lost."""
    terms = [
        {"weight": 50, "preference": {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}}
        for key, value in c.SPOT_LABELS
    ]
    return _more(node_affinity, _PREFERRED, terms)


def _no_other_job(namespace: str, job: str) -> list[Manifest]:
    """Return anti-affinity to workers of other jobs, in all namespaces."""
    ours = {c.LABEL_APP_MANAGED_BY: c.MANAGED_BY, c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER}
    other = {"key": c.LABEL_JOB, "operator": "NotIn", "values": [job]}
    elsewhere = {"key": c.LABEL_NAMESPACE, "operator": "NotIn", "values": [namespace]}
    return [
        {"topologyKey": c.LABEL_HOSTNAME, "labelSelector": {"matchLabels": ours, "matchExpressions": [other]}},
        {
            "topologyKey": c.LABEL_HOSTNAME,
            "namespaceSelector": {"matchExpressions": [elsewhere]},
            "labelSelector": {"matchLabels": ours},
        },
    ]


def in_host_network(pod_spec: Json) -> bool:
    """Return whether the pod has its node's network and ports."""
    return pod_spec.get("hostNetwork") is True


def _no_worker() -> Manifest:
    """Return anti-affinity to all workers, because all of them listen at the same ports."""
    ours = {c.LABEL_APP_MANAGED_BY: c.MANAGED_BY, c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER}
    return {"topologyKey": c.LABEL_HOSTNAME, "namespaceSelector": {}, "labelSelector": {"matchLabels": ours}}


def _spread(key: str, job: str) -> Manifest:
    """Return a spread constraint. Zones without a usable node do not count."""
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "nodeTaintsPolicy": "Honor",
        "labelSelector": _own(job),
    }


def _beside_own(job: str) -> Manifest:
    """Return a preference that keeps a spare away from the other workers."""
    return {"topologyKey": c.LABEL_HOSTNAME, "labelSelector": _own(job)}


def _own(job: str) -> Manifest:
    return {"matchLabels": {c.LABEL_JOB: job, c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER}}


def _more(value: Json, key: str, items: list[Manifest]) -> Manifest:
    """Return the mapping with these items appended to one of its lists."""
    return {**value, key: [*(value.get(key) or []), *items]} if items else dict(value)
