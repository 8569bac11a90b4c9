"""The job's restart rules as far as a launcher can judge them: exit codes, signals, memory, hangs. Pure.

The first rule that matches wins. The operator sends those before the first that only it can judge, and judges the
same failure again by the same rules when it hears of it, so both come to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.core.attempt import Json
from holdfast.core.protocol import Cause

if TYPE_CHECKING:
    from holdfast.launcher.membership.messages import Failure

FAIL_JOB = "FailJob"
IGNORE = "Ignore"
_SIGNALS = range(129, 193)
# Whoever lost its peers ends with a code of its own library's choice: that tells nothing of the script.
_OF_OTHERS = frozenset({"PeerLost", "MemberLost"})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a failure must look like, and what is then done about it. What is not asked for is None or empty."""

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
        """Read the wire form; a cause of another version is left as it was judged."""
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
        """Whether all that the rule asks for is so."""
        code = None if failure.reason in _OF_OTHERS else failure.exit_code
        asked = [
            code in self.exit_codes if self.exit_codes is not None else None,
            code is not None and code not in self.other_codes if self.other_codes is not None else None,
            code in _SIGNALS and (code or 0) - 128 in self.signals if self.signals is not None else None,
            failure.reason == "OutOfMemory" and self.oom in {"Process", "Any"} if self.oom else None,
            failure.reason == "Hung" if self.hang else None,
        ]
        given = [answer for answer in asked if answer is not None]
        return bool(given) and all(given)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The rules, and whether there are more that only the operator can judge."""

    rules: tuple[Rule, ...] = ()
    elsewhere: bool = False

    @classmethod
    def from_settings(cls, settings: Json) -> Restart:
        """From ``membership.settings``; an operator without rules sends none."""
        return cls(
            rules=tuple(Rule.from_json(value) for value in settings.get("rules", ())),
            elsewhere=settings.get("rulesElsewhere") is True,
        )

    def match(self, failure: Failure) -> Rule | None:
        return first_match(self.rules, failure)

    def judged(self, failure: Failure) -> Failure:
        """The failure under the cause that its rule names. Judging again changes nothing."""
        rule = self.match(failure)
        return failure if rule is None or rule.cause is None else replace(failure, cause=rule.cause)

    def ignores(self, failure: Failure) -> bool:
        """Whether it counts in no budget."""
        rule = self.match(failure)
        return rule is not None and rule.action == IGNORE


def first_match(rules: Sequence[Rule], failure: Failure) -> Rule | None:
    """The first rule that matches, if any does."""
    return next((rule for rule in rules if rule.matches(failure)), None)
