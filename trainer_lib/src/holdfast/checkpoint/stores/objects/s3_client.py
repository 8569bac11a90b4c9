"""The settings of an S3 bucket, and its boto3 client. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.stores.objects.bucket import IN_FLIGHT
from holdfast.core.environment import aws_region
from holdfast.core.errors import UsageError

_log = logging.getLogger("holdfast.checkpoint.s3")


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """How to access a bucket. By default, boto3 finds credentials, region and endpoint. Times are in seconds."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    part_bytes: int = 2 * CHUNK_BYTES
    in_flight: int = IN_FLIGHT
    attempts: int = 8
    pause_seconds: float = 0.25
    longest_pause_seconds: float = 20.0
    connect_seconds: float = 10.0
    read_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.bucket:
            raise UsageError("an S3 URL is s3://BUCKET/PREFIX; this one names no bucket")
        if self.part_bytes % CHUNK_BYTES or self.part_bytes < CHUNK_BYTES:
            raise UsageError(f"part_bytes must be a multiple of {CHUNK_BYTES}")

    @classmethod
    def of_url(cls, url: str) -> S3Settings:
        """Parse `s3://bucket/prefix`. An empty segment of the path (`//`) is dropped, with a warning."""
        parts = urlsplit(url)
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise UsageError(
                "an S3 URL is s3://BUCKET/PREFIX; endpoint, region and credentials come from the environment "
                "(AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_ACCESS_KEY_ID, …) or from boto3's files"
            )
        segments = list(filter(None, parts.path.split("/")))
        if not {".", ".."}.isdisjoint(segments):
            raise UsageError(f"{url}: '.' and '..' are names in S3, and some servers resolve them: remove them")
        prefix = "/".join(segments)
        if prefix != parts.path.strip("/"):
            _log.warning(
                "%s has an empty path segment, which some servers drop: s3://%s/%s is used. Move objects "
                "that were written with the empty segment there",
                *(url, parts.netloc, prefix),
            )
        return cls(bucket=parts.netloc, prefix=prefix)


def client_of(settings: S3Settings) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise UsageError("s3:// needs boto3, which is not installed: pip install 'holdfast-trainer[s3]'") from error
    config = Config(
        signature_version="s3v4",
        connect_timeout=settings.connect_seconds,
        read_timeout=settings.read_seconds,
        max_pool_connections=settings.in_flight + 2,
        tcp_keepalive=True,
        retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # The server compares each body's own checksum, so SHA-256 for the signature would add nothing.
        s3={"payload_signing_enabled": False},
    )
    try:
        return boto3.Session(**settings.credentials).client(
            "s3", endpoint_url=settings.endpoint, region_name=settings.region or aws_region(), config=config
        )
    except (BotoCoreError, ValueError) as error:
        raise UsageError(f"{settings.bucket}: boto3 cannot be set up: {error}") from error


def trusted_certificates() -> str | None:
    import botocore.session
    from botocore.httpsession import get_cert_path

    named = botocore.session.get_session().get_config_variable("ca_bundle")
    path = named or get_cert_path(True)
    return str(path) if path else None
