"""Writes docs/reference/faulttolerantjob.md from the CRD: `python tools/crd_reference.py FILE`, or `make generate`.

The page contains what `kubectl explain` prints. This module maps groups of fields to how-to pages, and a test checks
each of these pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

CRD = Path(__file__).resolve().parents[1] / "crds" / "holdfast.dev_faulttolerantjobs.yaml"
PAGES = {
    "workers": ["elasticity", "placement"],
    "elasticity": ["elasticity", "sharded-models"],
    "recovery": ["restart-policy"],
    "hangDetection": ["hang-detection"],
    "checkpoint": ["checkpoints", "memory-tier", "local-tier", "object-store", "suspend-and-deadlines"],
    "interruption": ["survive-interruptions"],
    "preflight": ["preflight"],
    "scheduling": ["placement"],
    "rendezvous": ["torchrun"],
    "nodeRemediation": ["node-remediation"],
    "suspend": ["suspend-and-deadlines"],
    "activeDeadlineSeconds": ["suspend-and-deadlines"],
    "startupDeadlineSeconds": ["suspend-and-deadlines", "hang-detection"],
    "ttlSecondsAfterFinished": ["suspend-and-deadlines"],
}
_HEAD = """# FaultTolerantJob

`holdfast.dev/v1alpha1`, short name `ftj`. `make generate` writes this page from `crds/`.
`kubectl explain` prints the same. `[]` is an entry of a list. All fields are optional except *required* ones.
"""
_KUBERNETES = "workers.template"
"""The fields below it are Kubernetes' own."""


def page(crd: Json) -> str:
    """Return the text of the page."""
    top = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec, status = (top["properties"][name] for name in ("spec", "status"))
    parts = [_HEAD]
    for name, group in spec["properties"].items():
        links = ", ".join(f"[{link}](../how-to/{link}.md)" for link in PAGES[name])
        inner = [row for row in rows(group, name) if row[0] != name]
        parts.append(f"## spec.{name}\n{_words(group)} {_bounds(group)}\n\nHow to: {links}\n".replace(" \n", "\n"))
        parts.append(_table(inner) if inner else "")
    parts.append("## status\n" + _words(status) + "\n")
    parts.append(_table([row for name, field in status["properties"].items() for row in rows(field, name)]))
    parts.append("## Validation messages\n" + "".join(f"- {text}\n" for text in messages(top)))
    return "\n".join(part for part in parts if part)


def rows(schema: Json, path: str, *, required: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield path, kind with bounds, and meaning of this field and of all fields below it."""
    listed = schema.get("type") == "array"
    yield path, _bounds(schema, required=required), _words(schema)
    if path == _KUBERNETES:
        return
    inner = schema.get("items", schema) if listed else schema
    for name, field in inner.get("properties", {}).items():
        is_required = name in inner.get("required", ())
        yield from rows(field, f"{path}{'[]' if listed else ''}.{name}", required=is_required)


def messages(schema: Json) -> list[str]:
    """Return the messages of the rules between fields, each once."""
    found = [rule["message"] for rule in schema.get("x-kubernetes-validations", ())]
    for inner in (*schema.get("properties", {}).values(), *filter(None, [schema.get("items")])):
        found += messages(inner)
    return list(dict.fromkeys(found))


def _bounds(schema: Json, *, required: bool = False) -> str:
    """Return in words: required or not, kind, values or bounds, default."""
    parts = ["*required*"] if required else []
    items = schema.get("items", {})
    if schema.get("x-kubernetes-int-or-string"):
        parts.append("quantity")
    elif "enum" in (items or schema):
        values = ", ".join(f"`{_literal(value)}`" for value in (items or schema)["enum"])
        parts.append(f"list of {values}" if items else values)
    else:
        parts.append(_kind(schema))
    default = schema.get("default")
    if default not in (None, {}):
        parts.append(f"default `{_literal(default)}`")
    return "; ".join(filter(None, parts))


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _kind(schema: Json) -> str:
    kind = str(schema.get("type", ""))
    if kind == "array":
        return f"list of {schema.get('items', {}).get('type', 'object')}s"
    least, most = schema.get("minimum"), schema.get("maximum")
    if kind == "integer" and most is not None:
        return f"{least:,} to {most:,}"
    return {"integer": "number", "object": ""}.get(kind, kind)


def _words(schema: Json) -> str:
    return " ".join(str(schema.get("description", "")).split())


def _table(found: list[tuple[str, str, str]]) -> str:
    lines = ["| field | type, bounds, default | meaning |", "|---|---|---|"]
    for path, bounds, words in found:
        cells = (f"`{path}`", bounds, words)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(yaml.safe_load(CRD.read_text())))
