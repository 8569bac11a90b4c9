"""Lists Kubernetes' own fields of a pod in the CRD: `python tools/pod_fields.py FILE`, or `make generate`.

The API server hides fields from CEL that a schema does not list, so a rule could not detect a change of them. A block
under a comment `# Fields of TYPE` lists the fields of that type, except those that are written by hand next to it.

pod_fields.json records the names, so that generating needs neither a cluster nor the sources of Kubernetes. For a new
version of Kubernetes, run `python tools/pod_fields.py --record 1.36.3`. It downloads the sources with Go.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CRD = Path(__file__).resolve().parents[1] / "crds" / "holdfast.dev_faulttolerantjobs.yaml"
RECORD = Path(__file__).with_suffix(".json")
TYPES = ("PodSpec", "Container", "EnvVar", "Volume")
_FIELD = "{x-kubernetes-preserve-unknown-fields: true, description: Same as in a Pod.}"
_BLOCK = re.compile(r"(?P<indent> *)# Fields of (?P<type>\w+)\b.*")


def filled(crd: str, fields: dict[str, list[str]]) -> str:
    """Return the CRD with the recorded fields in each block."""
    by_hand = [line for line in crd.splitlines() if not line.endswith(_FIELD)]
    lines: list[str] = []
    for number, line in enumerate(by_hand):
        lines.append(line)
        if block := _BLOCK.fullmatch(line):
            known = {
                *_siblings(by_hand[:number][::-1], block["indent"]),
                *_siblings(by_hand[number:], block["indent"]),
            }
            lines += (f"{block['indent']}{name}: {_FIELD}" for name in fields[block["type"]] if name not in known)
    return "\n".join(lines) + "\n"


def _siblings(lines: list[str], indent: str) -> Iterator[str]:
    """Yield the keys of this indentation, up to the first line that is less indented."""
    for line in lines:
        if line.strip() and not line.startswith(indent):
            return
        if key := re.match(rf"{indent}(\w+):", line):
            yield key[1]


def recorded(version: str) -> dict[str, object]:
    """Return the names of the fields from the OpenAPI document in the sources of this version of Kubernetes."""
    command = ["go", "mod", "download", "-json", f"k8s.io/kubernetes@v{version}"]
    sources = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["Dir"]
    types = json.loads((Path(sources) / "api" / "openapi-spec" / "swagger.json").read_text())["definitions"]
    return {
        "kubernetes": version,
        **{name: sorted(types[f"io.k8s.api.core.v1.{name}"]["properties"]) for name in TYPES},
    }


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        RECORD.write_text(json.dumps(recorded(sys.argv[2]), indent=1) + "\n")
    else:
        Path(sys.argv[1]).write_text(filled(CRD.read_text(), json.loads(RECORD.read_text())))
