"""The job's restart rules that a launcher can judge: exit codes, signals, memory, hangs. Pure.

The first matching rule applies. The operator sends the rules that precede the first one that only the operator can
judge. It applies the same rules to the reported failure, so both get the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.core.attempt import Json
from holdfast.core.protocol import OUT_OF_MEMORY_RETRIED, Cause

if TYPE_CHECKING:
    from holdfast.launcher.membership.messages import Failure

FAIL_JOB = "FailJob"
IGNORE = "Ignore"
_SIGNALS = range(129, 193)
# A process that lost its peers exits with a code of its library, which does not describe the script's failure.
_OF_OTHERS = frozenset({"PeerLost", "MemberLost"})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The conditions on a failure, and the action if all are met. A condition that is None or empty always holds."""

    name: str
    action: str
    cause: Cause | None = None
    exit_codes: frozenset[int] | None = None
    other_codes: frozenset[int] | None = None
    signals: frozenset[int] | None = None
    oom: str = ""
    hang: bool = False

    @classmethod
    def from_json(cls, value: Json) -> Rule:
        """Read the wire form. An unknown cause is ignored."""
        codes = value.get("exitCodes") or {}
        values = frozenset(map(int, codes.get("values", ())))
        cause, signals = value.get("cause"), value.get("signals")
        return cls(
            name=str(value["name"]),
            action=str(value["action"]),
            cause=Cause(cause) if cause in list(Cause) else None,
            exit_codes=values if codes.get("operator") == "In" else None,
            other_codes=values if codes.get("operator") == "NotIn" else None,
            signals=frozenset(map(int, signals)) if signals else None,
            oom=str(value.get("oom") or ""),
            hang=value.get("hang") is True,
        )

    def matches(self, failure: Failure) -> bool:
        """Whether the failure meets all conditions of the rule."""
        code = None if failure.reason in _OF_OTHERS else failure.exit_code
        conditions = [
            code in self.exit_codes if self.exit_codes is not None else None,
            code is not None and code not in self.other_codes if self.other_codes is not None else None,
            code in _SIGNALS and (code or 0) - 128 in self.signals if self.signals is not None else None,
            failure.reason == "OutOfMemory" and self.oom in {"Process", "Any"} if self.oom else None,
            failure.reason == "Hung" if self.hang else None,
        ]
        given = [answer for answer in conditions if answer is not None]
        return bool(given) and all(given)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The rules. `elsewhere`: there are more, which only the operator can judge."""

    rules: tuple[Rule, ...] = ()
    elsewhere: bool = False

    @classmethod
    def from_settings(cls, settings: Json) -> Restart:
        """Read ``membership.settings``. An operator without rules sends none."""
        return cls(
            rules=tuple(Rule.from_json(value) for value in settings.get("rules", ())),
            elsewhere=settings.get("rulesElsewhere") is True,
        )

    def match(self, failure: Failure) -> Rule | None:
        return first_match(self.rules, failure)

    def judged(self, failure: Failure) -> Failure:
        """Return the failure with the cause that its rule names. Applying it again changes nothing."""
        rule = self.match(failure)
        return failure if rule is None or rule.cause is None else replace(failure, cause=rule.cause)

    def ignores(self, failure: Failure) -> bool:
        """Whether the failure counts in no budget."""
        rule = self.match(failure)
        return failure.reason == OUT_OF_MEMORY_RETRIED if rule is None else rule.action == IGNORE


def first_match(rules: Sequence[Rule], failure: Failure) -> Rule | None:
    """Return the first matching rule, or None."""
    return next((rule for rule in rules if rule.matches(failure)), None)
