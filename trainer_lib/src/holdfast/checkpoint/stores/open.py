"""Open a store by its URL. No torch."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import SplitResult, unquote, urlsplit

from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.objects.bucket import IN_FLIGHT
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.core.errors import UsageError
from holdfast.core.paths import local_path


def open_store(url: str, *, attempts: int | None = None, in_flight: int | None = None) -> FolderStore | ObjectStore:
    """Open a folder (a path, or `file://`), a bucket (`s3://bucket/prefix`), or a URL with a scheme of fsspec.

    `attempts` is the number of tries of a request to a bucket. `in_flight` is the number of parts of files that may
    be transferred to or from a bucket at once.
    """
    if "://" not in url:
        return _folder(url)
    parts, at_once = parted(url), in_flight or IN_FLIGHT
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"file://{parts.netloc}{parts.path} names a host: write file:///PATH")
        return _folder(unquote(parts.path))
    if parts.scheme == "s3":
        from holdfast.checkpoint.stores.objects.s3 import s3_store
        from holdfast.checkpoint.stores.objects.s3_client import S3Settings

        settings = S3Settings.of_url(url)
        return s3_store(replace(settings, attempts=attempts or settings.attempts, in_flight=at_once))
    from holdfast.checkpoint.stores.objects.fsspec import fsspec_store

    return fsspec_store(url, at_once)


def parted(url: str) -> SplitResult:
    """Split a URL. Raise `UsageError` if it is not valid."""
    try:
        return urlsplit(url)
    except ValueError as error:
        scheme, _, rest = url.partition("://")
        raise UsageError(f"{scheme}://{rest.rpartition('@')[2]} is not a URL: {error}") from error


def _folder(path: str) -> FolderStore:
    if not path:
        raise UsageError(
            "the checkpoint folder is empty: pass a path, file:///PATH, s3://BUCKET/PREFIX or another URL"
        )
    return FolderStore(local_path(path))
