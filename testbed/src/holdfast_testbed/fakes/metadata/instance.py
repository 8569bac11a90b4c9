"""The cloud's service of an instance."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from holdfast_testbed.fakes.metadata.announcement import AWS, AZURE, GCP, Announcement
from holdfast_testbed.fakes.metadata.aws import Imds
from holdfast_testbed.fakes.metadata.azure import AzureMetadata
from holdfast_testbed.fakes.metadata.gcp import ComputeMetadata
from holdfast_testbed.fakes.metadata.server import Answer, Request, Service


class Instance:
    """The service of the announcement's cloud. It answers paths of other clouds as that cloud does."""

    name = "metadata"

    def __init__(
        self, announced: Callable[[], Announcement], now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._announced = announced
        self._services: dict[str, Service] = {
            AWS: Imds(announced=announced),
            GCP: ComputeMetadata(announced=announced),
            AZURE: AzureMetadata(announced=announced, now=now),
        }

    def answer(self, request: Request) -> Answer:
        """Return the answer of the instance's cloud."""
        return self._own.answer(request)

    def refusal(self, request: Request, status: int) -> Answer:
        """Return an error in the format of the instance's cloud."""
        return self._own.refusal(request, status)

    @property
    def _own(self) -> Service:
        return self._services[self._announced().cloud]


class AllClouds:
    """All services at one address, by their paths, for tests of several sources. No real machine has this."""

    name = "metadata"

    def __init__(self, aws: Imds, gcp: ComputeMetadata, azure: AzureMetadata) -> None:
        self._services: dict[str, Service] = {"latest": aws, "computeMetadata": gcp, "metadata": azure}

    def answer(self, request: Request) -> Answer:
        """Return the answer of the service that has this path."""
        service = self._asked(request)
        return Answer(status=404) if service is None else service.answer(request)

    def refusal(self, request: Request, status: int) -> Answer:
        """Return an error in the format of the service that has this path."""
        service = self._asked(request)
        return Answer(status=status) if service is None else service.refusal(request, status)

    def _asked(self, request: Request) -> Service | None:
        return self._services.get(request.path.split("/")[1])
