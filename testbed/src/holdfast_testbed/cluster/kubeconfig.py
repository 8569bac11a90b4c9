from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def certificate_user(certificate: Path, key: Path) -> dict[str, Any]:
    """Return a user with a client certificate."""
    return {"client-certificate": str(certificate), "client-key": str(key)}


def token_user(token: str) -> dict[str, Any]:
    """Return a user with a bearer token."""
    return {"token": token}


def write_kubeconfig(path: Path, *, server: str, authority: Path, user: dict[str, Any], namespace: str = "") -> Path:
    """Write a kubeconfig (JSON is YAML) and return its path."""
    context: dict[str, str] = {"cluster": "testbed", "user": "user"}
    if namespace:
        context["namespace"] = namespace
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "testbed", "cluster": {"server": server, "certificate-authority": str(authority)}}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "testbed", "context": context}],
        "current-context": "testbed",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path
