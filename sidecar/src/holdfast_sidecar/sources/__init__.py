"""Sources of interruption notices, each behind `base.Source`."""

import logging
from collections.abc import Callable

from holdfast_sidecar import constants as c
from holdfast_sidecar.settings import Settings
from holdfast_sidecar.sources.aws import AwsSource
from holdfast_sidecar.sources.base import Source
from holdfast_sidecar.transport import Connection

_log = logging.getLogger(__name__)


def build(settings: Settings, monotonic: Callable[[], float]) -> list[Source]:
    """The sources that the settings name. A name that this version does not know is left out, and said: the pod must
    train also when its operator is newer than its sidecar."""
    found: list[Source] = []
    for name in dict.fromkeys(settings.providers):
        if name == c.PROVIDER_AWS:
            metadata = Connection(settings.metadata_url, monotonic, max_bytes=c.MAX_METADATA_BYTES)
            found.append(AwsSource(metadata, monotonic, checkpoint_deadline=settings.checkpoint_deadline_seconds))
        else:
            _log.error("%s is no source of notices that this sidecar knows; it is left out", name[:40])
    return found
