"""Writes docs/reference/reasons.md from the operator's enums: `python tools/reasons.py FILE`, or `make generate`.

Each member's docstring is its row: the first paragraph is the meaning, the second what to do.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "operator" / "src" / "holdfast_operator" / "api" / "reasons"
TITLES = {
    "JobReason": "State of the job",
    "WaitReason": "Waiting",
    "StartupReason": "Workers that cannot start",
    "FailureReason": "Failed and leaving workers",
    "LauncherReason": "Failures that launchers report",
    "DecisionReason": "Decisions",
    "WorkerReason": "Changes of workers",
    "MembershipReason": "Membership",
    "NodeReason": "Events on nodes",
    "Cause": "Causes of incidents",
    "RecoveryAction": "Actions",
}
"""The sections of the page, in this order. An enum without a title has no section."""
_HEAD = """# Reasons

Every cause, action and reason that the operator writes to conditions, events, `status` and metrics, with its meaning
and what to do. Where the last column is empty, you need not do anything. `make generate` writes this page from
`operator/src/holdfast_operator/api/reasons/`.

`kubectl get ftj` shows the reason of the condition that matters now. `kubectl describe ftj NAME` shows all conditions
and events with their messages.

Kubernetes adds reasons of its own: those of a pod's condition `DisruptionTarget` (`PreemptionByScheduler`,
`EvictionByEvictionAPI`, `DeletionByTaintManager`, …) become the reason of the interruption.
"""

Row = tuple[str, str, str]


def page(source: str) -> str:
    """Return the text of the page."""
    enums = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    parts = [_HEAD]
    for name, title in TITLES.items():
        table = "\n".join(f"| `{value}` | {meaning} | {action} |" for value, meaning, action in rows(enums[name]))
        text = _joined(ast.get_docstring(enums[name]) or "")
        parts.append(f"## {title}\n{text}\n\n| reason | meaning | what to do |\n|---|---|---|\n{table}\n")
    return "\n".join(parts)


def rows(enum: ast.ClassDef) -> Iterator[Row]:
    """Yield value, meaning and advice of each member. Raises ``SystemExit`` for a member without a docstring."""
    for member, text in zip(enum.body, [*enum.body[1:], None], strict=True):
        if not isinstance(member, ast.Assign) or not isinstance(member.value, ast.Constant):
            continue
        if not isinstance(text, ast.Expr) or not isinstance(text.value, ast.Constant):
            raise SystemExit(f"{enum.name}: {member.value.value} has no docstring")
        meaning, _, action = str(text.value.value).partition("\n\n")
        yield str(member.value.value), _joined(meaning), _joined(action)


def _joined(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page("\n".join(path.read_text() for path in SOURCE.glob("[a-z]*.py"))))
