"""Sources of interruption notices, each behind `source.Source`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_sidecar import constants as c
from holdfast_sidecar.interruptions.aws import AwsSource
from holdfast_sidecar.interruptions.azure import AzureSource
from holdfast_sidecar.interruptions.gcp import GcpSource
from holdfast_sidecar.interruptions.metadata import OnError
from holdfast_sidecar.interruptions.source import Source
from holdfast_sidecar.runtime.http import Connection
from holdfast_sidecar.settings import Settings

_log = logging.getLogger(__name__)

Monotonic = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class _Surroundings:
    settings: Settings
    monotonic: Monotonic
    committed: Callable[[str], bool]
    on_error: OnError

    def metadata(self) -> Connection:
        """Open a connection for one source. A source that waits for its answer delays no other."""
        return Connection(self.settings.metadata_url, self.monotonic, max_bytes=c.MAX_METADATA_BYTES)


def _aws(here: _Surroundings) -> Source:
    deadline = here.settings.checkpoint_deadline_seconds
    return AwsSource(here.metadata(), here.monotonic, checkpoint_deadline=deadline, on_error=here.on_error)


def _gcp(here: _Surroundings) -> Source:
    deadline = here.settings.checkpoint_deadline_seconds
    hold = int(c.SOURCE_POLL_SECONDS)
    gpus = bool(here.settings.dcgm_url)
    return GcpSource(here.metadata(), checkpoint_deadline=deadline, hold=hold, gpus=gpus, on_error=here.on_error)


def _azure(here: _Surroundings) -> Source:
    deadline = here.settings.checkpoint_deadline_seconds
    return AzureSource(here.metadata(), checkpoint_deadline=deadline, committed=here.committed)


_CLOUDS: dict[str, Callable[[_Surroundings], Source]] = {
    c.PROVIDER_AWS: _aws,
    c.PROVIDER_GCP: _gcp,
    c.PROVIDER_AZURE: _azure,
}


def build(
    settings: Settings,
    monotonic: Monotonic,
    committed: Callable[[str], bool],
    on_error: OnError = lambda _: None,
) -> list[Source]:
    """Return the sources that the settings name.

    An unknown name is skipped and logged, because the pod must train even if its operator is newer than its sidecar.
    `committed` reports whether a notice's checkpoint is published. `on_error` counts requests that failed although
    the poll continued.
    """
    here = _Surroundings(settings=settings, monotonic=monotonic, committed=committed, on_error=on_error)
    found: list[Source] = []
    for name in dict.fromkeys(settings.providers):
        if name in _CLOUDS:
            found.append(_CLOUDS[name](here))
        else:
            _log.error("%s is no source of notices that this sidecar knows; it is left out", name[:40])
    return found
