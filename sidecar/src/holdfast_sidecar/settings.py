"""The sidecar's settings. The environment is read here and nowhere else."""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import SettingsError
from holdfast_sidecar.protocol.report import Pod

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreflightSettings:
    """What the job wants to know."""

    checks: tuple[str, ...]
    seconds: float
    """How long a check may take."""
    gpus: int
    """How many the pod asks for."""
    skew_seconds: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that a sidecar is told from outside."""

    pod: Pod
    run_dir: Path
    operator_url: str
    token_file: Path
    ca_file: Path
    providers: tuple[str, ...]
    checkpoint_deadline_seconds: float
    metadata_url: str
    dcgm_url: str
    """Where the node's GPU exporter answers; empty: it is not asked."""
    address: str
    port: int
    preflight: PreflightSettings | None = None
    """What is looked at before the pod may join; None: nothing."""
    launched: bool = True
    """Whether a launcher of Holdfast is to be heard."""

    def __post_init__(self) -> None:
        _check_address(c.ENV_OPERATOR_URL, self.operator_url, "https")
        _check_address(c.ENV_METADATA_URL, self.metadata_url, "http")
        if not 0 <= self.port < 65536:
            raise SettingsError(f"{c.ENV_SIDECAR_PORT} must be a port, not {self.port}")
        if not 0 < self.checkpoint_deadline_seconds < 86400:
            raise SettingsError(f"{c.ENV_CHECKPOINT_DEADLINE} must be seconds within a day")


def read_environment(environment: Mapping[str, str] | None = None) -> Settings:
    env = os.environ if environment is None else environment
    return Settings(
        pod=Pod(
            namespace=_required(env, c.ENV_POD_NAMESPACE),
            name=_required(env, c.ENV_POD_NAME),
            uid=_required(env, c.ENV_POD_UID),
            node=env.get(c.ENV_NODE_NAME, ""),
        ),
        run_dir=Path(env.get(c.ENV_RUN_DIR) or c.DEFAULT_RUN_DIR),
        operator_url=_required(env, c.ENV_OPERATOR_URL).rstrip("/"),
        token_file=Path(env.get(c.ENV_TOKEN_FILE) or c.DEFAULT_TOKEN_FILE),
        ca_file=Path(env.get(c.ENV_CA_FILE) or c.DEFAULT_CA_FILE),
        providers=_names(env, c.ENV_NOTICE_PROVIDERS),
        checkpoint_deadline_seconds=_number(env, c.ENV_CHECKPOINT_DEADLINE, c.DEFAULT_CHECKPOINT_DEADLINE_SECONDS),
        metadata_url=(env.get(c.ENV_METADATA_URL) or c.DEFAULT_METADATA_URL).rstrip("/"),
        dcgm_url=_exporter(env),
        address=env.get(c.ENV_SIDECAR_ADDRESS, ""),
        port=int(_number(env, c.ENV_SIDECAR_PORT, c.DEFAULT_PORT)),
        preflight=_preflight(env),
        launched=env.get(c.ENV_LAUNCHER, "").strip() != "None",
    )


def _preflight(env: Mapping[str, str]) -> PreflightSettings | None:
    checks = _names(env, c.ENV_PREFLIGHT)
    if not checks:
        return None
    return PreflightSettings(
        checks=checks[: c.MAX_CHECKS],
        seconds=_number(env, c.ENV_PREFLIGHT_SECONDS, c.DEFAULT_PREFLIGHT_SECONDS),
        gpus=int(_number(env, c.ENV_PREFLIGHT_GPUS, 0)),
        skew_seconds=_number(env, c.ENV_PREFLIGHT_SKEW, c.DEFAULT_PREFLIGHT_SKEW_SECONDS),
    )


def _names(env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in env.get(variable, "").split(",") if name.strip())


def _exporter(env: Mapping[str, str]) -> str:
    """Nothing for an address that is none: a sidecar that ended for it would keep its trainer from starting."""
    url = _with_path(_bracketed(env.get(c.ENV_DCGM_URL, "").strip(), env.get(c.ENV_HOST_IP, "").strip()))
    try:
        if url:
            _check_address(c.ENV_DCGM_URL, url, "http")
    except SettingsError as error:
        _log.error("%s: GPUs are not watched", error)
        return ""
    return url


def _bracketed(url: str, node: str) -> str:
    """The kubelet puts the node's address in as it is: where IPv6's ends, the text does not tell."""
    scheme, between, rest = url.partition("://")
    if ":" not in node or not rest.startswith(node) or rest[len(node) :][:1] not in ("", ":", "/"):
        return url
    return f"{scheme}{between}[{node}]{rest[len(node) :]}"


def _with_path(url: str) -> str:
    """The exporter's address with its usual path where none is given."""
    bare = url and not url.partition("://")[2].partition("/")[2]
    return f"{url.rstrip('/')}/metrics" if bare else url


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise SettingsError(f"{name} is not set")
    return value


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "").strip()
    try:
        number = float(text) if text else float(default)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SettingsError(f"{name} must be a number, not {text!r}")
    return number


def _check_address(name: str, text: str, scheme: str) -> None:
    try:
        url = urlsplit(text)
        good = url.scheme == scheme and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good:
        raise SettingsError(f"{name} must be an {scheme}:// address, not {text!r}")
