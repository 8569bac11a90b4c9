"""A cloud instance's metadata service, as far as interruptions need it: AWS, GCP or Azure.

What the cloud has announced stands in a small JSON file that is read at each request, so that another process can
write it. Each service answers as its cloud documents: paths, headers, status codes and delays.
"""

from holdfast_testbed.fakes.metadata.announcement import (
    AWS,
    AZURE,
    CLOUDS,
    GCP,
    KINDS,
    NOTICE_SECONDS,
    PREEMPTION,
    Announcement,
    Event,
)
from holdfast_testbed.fakes.metadata.aws import Imds
from holdfast_testbed.fakes.metadata.azure import AzureMetadata
from holdfast_testbed.fakes.metadata.gcp import ComputeMetadata
from holdfast_testbed.fakes.metadata.instance import AllClouds, Instance
from holdfast_testbed.fakes.metadata.server import FAULTS, Answer, MetadataServer, Request, Service

__all__ = [
    "AWS",
    "AZURE",
    "CLOUDS",
    "FAULTS",
    "GCP",
    "KINDS",
    "NOTICE_SECONDS",
    "PREEMPTION",
    "AllClouds",
    "Announcement",
    "Answer",
    "AzureMetadata",
    "ComputeMetadata",
    "Event",
    "Imds",
    "Instance",
    "MetadataServer",
    "Request",
    "Service",
]
