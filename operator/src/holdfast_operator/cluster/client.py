"""The API server, as plain JSON over the official client's transport. Blocking: only for our own threads.

Every call has a time limit, and every failure is one of ``errors.ClusterError``. Objects are read as dictionaries:
building the client's models costs three times as much.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import StartupReason
from holdfast_operator.cluster.cache import Listing, version
from holdfast_operator.cluster.trimming import slim, slim_job, slim_pod
from holdfast_operator.errors import BlockedError, ClusterError, ConflictError, NotFoundError, RejectedError

JsonObject = dict[str, Any]
Keep = Callable[[JsonObject], Mapping[str, Any]]

REQUEST_SECONDS = (5.0, 30.0)
PAGE = 500
# Objects per page. A whole page is in memory while it is read, and a job of a megabyte takes 30 times that as
# objects.
JOBS_PAGE = 5
JSON = "application/json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"

_JOBS = f"/apis/{c.GROUP}/{c.API_VERSION}"
_CHILDREN = {
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
}
_LEASES = "/apis/coordination.k8s.io/v1/namespaces"


@dataclass(frozen=True, kw_only=True)
class ListPacing:
    """The pace of a list: objects per page, seconds between pages, and the number of such pauses."""

    page: int = PAGE
    rest_seconds: float = 0.0
    rests: int = 0


AT_ONCE: Final = ListPacing()
# For lists that no pass waits for, while passes need the CPU. The pauses take a minute at most: the API server allows
# a list to be continued for five.
AT_LEISURE: Final = ListPacing(page=100, rest_seconds=0.4, rests=150)


class Cluster:
    """The operator's requests to the API server. Thread-safe, because the client's pool is."""

    def __init__(
        self,
        api: ApiClient,
        *,
        seconds: tuple[float, float] = REQUEST_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api = api
        self._seconds = seconds
        self._sleep = sleep

    # Reads

    def job(self, namespace: str, name: str) -> JsonObject | None:
        found = self._get(f"{_JOBS}/namespaces/{namespace}/{c.PLURAL}/{name}")
        return None if found is None else slim_job(found)

    def jobs(self, namespace: str = "", *, keep: Keep = slim_job, pace: ListPacing = AT_ONCE) -> Listing:
        """List the jobs of a namespace, or of all. ``keep`` trims each object when its page arrives."""
        pace = replace(pace, page=min(pace.page, JOBS_PAGE))
        return self._list(f"{_JOBS}{_in(namespace)}/{c.PLURAL}", keep=keep, pace=pace)

    def pods(
        self,
        namespace: str = "",
        selector: str = c.POD_SELECTOR,
        *,
        keep: Keep = slim_pod,
        pace: ListPacing = AT_ONCE,
    ) -> Listing:
        """List pods by label, with ``keep`` as for jobs."""
        return self._list(f"/api/v1{_in(namespace)}/pods", {"labelSelector": selector}, keep=keep, pace=pace)

    def pod(self, namespace: str, name: str) -> JsonObject | None:
        """Return one pod, whatever its labels, or None."""
        found = self._get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        return None if found is None else slim_pod(found)

    def nodes(self) -> Listing:
        return self._list("/api/v1/nodes", keep=slim)

    def node(self, name: str) -> JsonObject | None:
        return self._get(f"/api/v1/nodes/{quote(name, safe='')}")

    def lease(self, node: str) -> JsonObject | None:
        """Return a node's Lease, or None."""
        return self._get(f"{_LEASES}/kube-node-lease/leases/{quote(node, safe='')}")

    def own_lease(self, namespace: str) -> JsonObject | None:
        """Return the Lease of the operator's replicas, or None."""
        return self._get(f"{_LEASES}/{namespace}/leases/{c.LEASE_NAME}")

    def pod_events(self, namespace: str, uid: str) -> list[Mapping[str, Any]]:
        fields = f"involvedObject.uid={uid}"
        return list(self._list(f"/api/v1/namespaces/{namespace}/events", {"fieldSelector": fields}).items)

    def pods_on(self, node: str) -> list[Mapping[str, Any]]:
        """List all pods of a node, including those of others."""
        return list(self._list("/api/v1/pods", {"fieldSelector": f"spec.nodeName={node}"}).items)

    def config_map(self, namespace: str, name: str) -> JsonObject | None:
        return self._get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")

    # Writes

    def patch_status(self, job: Mapping[str, str], patch: Mapping[str, Any]) -> JsonObject:
        """Merge into the status of exactly this version of this job. Raises ``ConflictError`` if it has changed."""
        body = {
            "metadata": {"uid": job["uid"], "resourceVersion": job["resourceVersion"]},
            "status": patch,
        }
        path = f"{_JOBS}/namespaces/{job['namespace']}/{c.PLURAL}/{job['name']}/status"
        return slim_job(self._call("PATCH", path, {"fieldManager": c.FIELD_MANAGER}, body, MERGE))

    def apply(self, manifest: JsonObject) -> JsonObject:
        """Create a job's child other than a pod, or apply it to exactly the found object of the job.

        Raises ``ConflictError`` if another object has replaced it meanwhile, which stays unchanged.
        """
        meta = manifest["metadata"]
        api, plural = _CHILDREN[manifest["kind"]]
        every = f"{api}/namespaces/{meta['namespace']}/{plural}"
        path = f"{every}/{meta['name']}"
        found = self._get(path)
        if found is None:
            with _naming(f"{manifest['kind']} {meta['name']}"):
                return self._call("POST", every, {"fieldManager": c.FIELD_MANAGER}, manifest, JSON)
        if not _same_owner(found, manifest):
            told = "an object of this name exists and belongs to another owner: delete it, or rename the job"
            raise RejectedError(f"{manifest['kind']} {meta['name']}", StartupReason.NAME_TAKEN, told)
        with _naming(f"{manifest['kind']} {meta['name']}"):
            exactly = {**manifest, "metadata": {**meta, "uid": found["metadata"]["uid"]}}
            return self._call("PATCH", path, {"fieldManager": c.FIELD_MANAGER, "force": "true"}, exactly, APPLY)

    def create_pod(self, manifest: JsonObject) -> JsonObject | None:
        """Create a pod. None if one of ours with this name exists."""
        meta = manifest["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods"
        try:
            with _naming(f"pod {meta['name']}"):
                # Strict: a misspelt field of the template would be dropped, and the pod run without it.
                query = {"fieldManager": c.FIELD_MANAGER, "fieldValidation": "Strict"}
                return self._call("POST", path, query, manifest, JSON)
        except ConflictError:
            found = self._get(f"{path}/{meta['name']}")
            if found is not None and not _same_owner(found, manifest):
                told = "a pod of this name exists and belongs to another owner: delete it, or rename the job"
                raise RejectedError(f"pod {meta['name']}", StartupReason.NAME_TAKEN, told) from None
            return None

    def lift_gate(self, namespace: str, name: str, uid: str, node_labels: Mapping[str, str]) -> None:
        """Remove our gate from a pod; other gates stay.

        A node selector may be set in the same request, and never later.
        """
        spec: dict[str, Any] = {"schedulingGates": [{"name": c.GANG_GATE, "$patch": "delete"}]}
        if node_labels:
            spec["nodeSelector"] = dict(node_labels)
        self._patch_pod(namespace, name, {"metadata": {"uid": uid}, "spec": spec})

    def label_pod(self, namespace: str, name: str, uid: str, labels: Mapping[str, str]) -> None:
        self._patch_pod(namespace, name, {"metadata": {"uid": uid, "labels": dict(labels)}})

    def restore_pod(self, namespace: str, name: str, uid: str, marks: Mapping[str, Any]) -> None:
        """Merge labels and owner references into exactly this pod."""
        self._patch_pod(namespace, name, {"metadata": {"uid": uid, **marks}})

    def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this pod. It may already be gone."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            self._call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", {}, body, JSON)
        except (NotFoundError, ConflictError):
            return

    def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this job; the garbage collector deletes its children. It may already be gone."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        body = {**options, "preconditions": {"uid": uid}}
        try:
            self._call("DELETE", f"{_JOBS}/namespaces/{namespace}/{c.PLURAL}/{name}", {}, body, JSON)
        except (NotFoundError, ConflictError):
            return

    def tell(self, event: JsonObject) -> None:
        """Write an event (events.k8s.io/v1)."""
        namespace = event["metadata"]["namespace"]
        self._call("POST", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", {}, event, JSON)

    def evict(self, namespace: str, name: str, uid: str) -> None:
        """Evict exactly this pod.

        It may already be gone. Raises ``BlockedError`` if the eviction is not allowed now.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            self._call("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", {}, body, JSON)
        except (NotFoundError, ConflictError):
            return

    def patch_node(self, name: str, body: JsonObject) -> None:
        """Merge into a node, on the version that ``body`` names. Raises ``ConflictError`` if it has changed."""
        path = f"/api/v1/nodes/{quote(name, safe='')}"
        self._call("PATCH", path, {"fieldManager": c.FIELD_MANAGER_NODES}, body, MERGE)

    def apply_config_map(self, namespace: str, name: str, data: Mapping[str, str]) -> None:
        """Apply one of the operator's own ConfigMaps on the server side."""
        meta = {"name": name, "namespace": namespace, "labels": {c.LABEL_APP_MANAGED_BY: c.MANAGED_BY}}
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": dict(data)}
        path = f"/api/v1/namespaces/{namespace}/configmaps/{name}"
        self._call("PATCH", path, {"fieldManager": c.FIELD_MANAGER, "force": "true"}, manifest, APPLY)

    def write_own_lease(self, body: JsonObject) -> JsonObject:
        """Replace exactly the version that ``body`` names, or else create the Lease.

        Raises ``ConflictError`` if another writer was faster.
        """
        path = f"{_LEASES}/{body['metadata']['namespace']}/leases"
        if "resourceVersion" in body["metadata"]:
            return self._call("PUT", f"{path}/{c.LEASE_NAME}", {"fieldManager": c.FIELD_MANAGER}, body)
        return self._call("POST", path, {"fieldManager": c.FIELD_MANAGER}, body)

    # Transport

    def _patch_pod(self, namespace: str, name: str, body: JsonObject) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self._call("PATCH", path, {"fieldManager": c.FIELD_MANAGER}, body, STRATEGIC)

    def _get(self, path: str) -> JsonObject | None:
        try:
            return self._call("GET", path, {})
        except NotFoundError:
            return None

    def _list(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        keep: Keep = lambda item: item,
        pace: ListPacing = AT_ONCE,
    ) -> Listing:
        items: list[Mapping[str, Any]] = []
        token, known = "", 0
        for number in itertools.count():
            page = self._call("GET", path, {**(query or {}), "limit": str(pace.page), "continue": token})
            items += map(keep, page.get("items") or ())
            known = known or version(page)
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                break
            if number < pace.rests:
                self._sleep(pace.rest_seconds)
        return Listing(items=items, version=known)

    def _call(
        self, method: str, path: str, query: Mapping[str, str], body: Any = None, content_type: str = JSON
    ) -> JsonObject:
        headers = {"Accept": JSON} | ({"Content-Type": content_type} if body is not None else {})
        asked = [(key, value) for key, value in query.items() if value]
        try:
            request = self._api.param_serialize(
                method, path, query_params=asked, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = self._api.call_api(*request, _request_timeout=self._seconds)
            raw = response.read() or b"{}"  # type: ignore[no-untyped-call]
        except (ApiException, HTTPError) as error:
            raise ClusterError(f"{method} {path} failed: {type(error).__name__}: {error}") from None
        if not 200 <= response.status <= 299:
            raise _error(response.status, raw, f"{method} {path}")
        answer = json.loads(raw)
        return answer if isinstance(answer, dict) else {}


def _error(status: int, raw: bytes, what: str) -> ClusterError:
    """Convert the response to one of our errors, with the API server's message."""
    try:
        told = json.loads(raw)
    except ValueError:
        told = {}
    message = str(told.get("message") or raw[:200].decode(errors="replace")) if isinstance(told, dict) else ""
    if status == 404:
        return NotFoundError(f"{what}: {message}")
    if status == 409:
        return ConflictError(f"{what}: {message}")
    if status == 429:
        return BlockedError(f"{what}: {message}")
    if status in (400, 403, 422):
        return RejectedError(what, _reason(status, message), message)
    return ClusterError(f"{what} was answered with {status}: {message}")


def _reason(status: int, message: str) -> StartupReason:
    if "exceeded quota" in message or "must specify" in message:
        return StartupReason.QUOTA_EXCEEDED
    if "violates PodSecurity" in message:
        return StartupReason.POD_SECURITY_VIOLATION
    if "is being terminated" in message:
        return StartupReason.NAMESPACE_TERMINATING
    if "denied request" in message or "denied the request" in message:  # of a policy, of a webhook
        return StartupReason.ADMISSION_DENIED
    return StartupReason.TEMPLATE_INVALID if status in (400, 422) else StartupReason.REJECTED


class _naming:  # noqa: N801 - reads as a statement
    """Raise cluster errors of the block with this object's name."""

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RejectedError):
            raise RejectedError(self._subject, error.reason, error.message) from None


def _same_owner(found: JsonObject, manifest: JsonObject) -> bool:
    ours = {owner["uid"] for owner in manifest["metadata"].get("ownerReferences") or ()}
    owners = {owner.get("uid") for owner in found["metadata"].get("ownerReferences") or ()}
    return bool(ours & owners)


def _in(namespace: str) -> str:
    return f"/namespaces/{namespace}" if namespace else ""
