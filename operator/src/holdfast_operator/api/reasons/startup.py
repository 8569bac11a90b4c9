"""Workers that cannot start."""

from __future__ import annotations

from enum import StrEnum


class StartupReason(StrEnum):
    """Why workers cannot start. The job fails with this reason after `spec.startupDeadlineSeconds`."""

    UNSCHEDULABLE = "Unschedulable"
    """No node can take a worker.

    Compare the requests, node selectors and tolerations of the template with the nodes.
    """
    NO_SCHEDULER_RESPONSE = "NoSchedulerResponse"
    """A pod has no node, and no scheduler has reported why.

    Check that the scheduler of `schedulerName` is running.
    """
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """An image cannot be pulled.

    Check its name, its registry and `imagePullSecrets`.
    """
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    """A container cannot be created.

    Create the ConfigMap or Secret that the message names, or correct the template.
    """
    CONTAINER_CRASHES = "ContainerCrashes"
    """A container exits repeatedly before the trainer starts.

    Read its log.
    """
    CONTAINER_FAILED = "ContainerFailed"
    """The trainer container cannot be started.

    Correct the command or the container settings of the template.
    """
    INIT_CONTAINER_FAILED = "InitContainerFailed"
    """An init container failed.

    Read its log.
    """
    HOLDFAST_MISSING = "HoldfastMissing"
    """The command of the trainer does not exist in the image.

    Install the holdfast package in the image, or correct the command.
    """
    NO_LAUNCHER_DETECTED = "NoLauncherDetected"
    """The trainer is running, but no Holdfast launcher reports.

    Begin the command with `holdfast run --`, or set `rendezvous.backend`.
    """
    POD_START_FAILED = "PodStartFailed"
    """The kubelet cannot start the pod, for example its sandbox or network.

    Check the node that the message names.
    """
    POD_REFUSED = "PodRefused"
    """The kubelet refused the pod.

    Do what the message says; the job avoids the node for 10 minutes where it can.
    """
    VOLUME_FAILED = "VolumeFailed"
    """A volume cannot be attached or mounted.

    Check the volume and its driver.
    """
    VOLUME_MISSING = "VolumeMissing"
    """A pod waits for a PersistentVolumeClaim.

    Create the claim, or check why it is not bound.
    """
    PREFLIGHT_FAILED = "PreflightFailed"
    """A preflight check failed on a node.

    Repair what the message names, or set `preflight.onFailure`.
    """
    PREFLIGHT_IGNORED = "PreflightIgnored"
    """A preflight check failed, and the worker joins anyway (`preflight.onFailure: Ignore`)."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A ResourceQuota of the namespace does not allow the pod.

    Raise the quota or reduce the requests.
    """
    POD_SECURITY_VIOLATION = "PodSecurityViolation"
    """The Pod Security level of the namespace does not allow the pod.

    Correct the security context of the template.
    """
    NAMESPACE_TERMINATING = "NamespaceTerminating"
    """The namespace is being deleted."""
    ADMISSION_DENIED = "AdmissionDenied"
    """An admission webhook or policy rejected the object.

    Change the template as the message says.
    """
    TEMPLATE_INVALID = "TemplateInvalid"
    """The API server rejected the pod as invalid.

    Correct the field of the template that the message names.
    """
    REJECTED = "Rejected"
    """The API server refused to create an object.

    Check the operator's permissions and the message.
    """
    NAME_TAKEN = "NameTaken"
    """An object with this name exists and does not belong to the job.

    Delete or rename it.
    """
    CREATION_FAILED = "CreationFailed"
    """An object could not be created; the operator tries again."""
