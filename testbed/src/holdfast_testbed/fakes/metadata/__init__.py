"""The metadata service of an instance of AWS, GCP or Azure, with the parts that concern interruptions.

A small JSON file contains the cloud's announcements. It is read at each request, so that another process can write
it. Each service follows its cloud's documentation: paths, headers, status codes and delays.
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
