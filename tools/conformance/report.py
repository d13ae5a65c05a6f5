"""What a conformance run found: text for people, plain data for programs, JUnit's XML for a CI."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from outrider.tools.conformance.cases import Result
from outrider.tools.conformance.expectations import Expectation, expected, surprise, unmet
from outrider.tools.conformance.outcomes import CRASH, HANG, KINDS, PASS, UNSUPPORTED, Outcome
from outrider.tools.text import table

FORMAT = 1  # of the plain data; counted up when a field goes or changes its meaning
_DETAIL_LINES = 6
_THREAD = re.compile(r"(Current thread|Thread) 0x")
_DECLINES = 20
_OPERATORS = 30


@dataclass(frozen=True)
class Report:
    """`about`: the provider, its versions and attributes, and what it wrote to its `output`. `whole`: every case was
    asked for, so an expectation that fits none is wrong. `ended`: why the run stopped before its end, '' if it did
    not."""

    about: dict[str, Any]
    results: Sequence[Result]
    entries: Sequence[Expectation] = ()
    whole: bool = False
    ended: str = ""
    seconds: float = 0.0
    counts: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", Counter(one.outcome.kind for one in self.results))

    @property
    def surprises(self) -> list[tuple[Result, str]]:
        """Results that are not as they should be, and what is wrong with them."""
        found = [(one, surprise(one, expected(one.name, self.entries))) for one in self.results]
        return [(one, wrong) for one, wrong in found if wrong]

    @property
    def unmet(self) -> list[str]:
        """Expectations that fit no case."""
        return unmet(self.entries, [one.name for one in self.results]) if self.whole and not self.ended else []

    @property
    def ok(self) -> bool:
        """Whether nothing failed but what was expected to."""
        return not (self.surprises or self.unmet or self.ended)

    # Plain data ----------------------------------------------------------------------------------------------------
    def plain(self) -> dict[str, Any]:
        """{format, provider, versions, attributes, output, ok, ended, seconds, counts, unmet, cases}.

        `cases`: [{name, group, kind, ok, reason, hint, remedy, detail, expected, seconds}] in the order in which they
        ran; `expected`: {kind, reason} of the entry that counts, or None.
        """
        wrong = {one.name for one, _ in self.surprises}
        return {
            "format": FORMAT,
            **self.about,
            "ok": self.ok,
            "ended": self.ended,
            "seconds": round(self.seconds, 3),
            "counts": {kind: self.counts[kind] for kind in KINDS},
            "unmet": self.unmet,
            "cases": [self._case(one, one.name not in wrong) for one in self.results],
        }

    def _case(self, one: Result, ok: bool) -> dict[str, Any]:
        entry = expected(one.name, self.entries)
        return {
            "name": one.name,
            "group": one.group,
            "kind": one.outcome.kind,
            "ok": ok,
            "reason": one.outcome.reason,
            "hint": one.outcome.hint,
            "remedy": "" if one.outcome.good else one.remedy,
            "detail": one.outcome.detail,
            "expected": None if entry is None else {"kind": entry.kind, "reason": entry.reason},
            "seconds": round(one.seconds, 3),
        }

    def junit(self) -> str:
        """JUnit's XML: a test case for each case, with a failure for each surprise; what is declined is skipped."""
        wrong = {one.name: what for one, what in self.surprises}
        counts = {"tests": len(self.results), "failures": len(wrong), "skipped": self.counts[UNSUPPORTED]}
        told = {"name": f"conformance of {self.about['provider']}", **{key: str(n) for key, n in counts.items()}}
        suite = ElementTree.Element("testsuite", told)
        for one in self.results:
            family, _, name = one.name.partition("/")
            attributes = {"classname": family, "name": name, "time": f"{one.seconds:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", attributes)
            if one.name in wrong:
                failure = ElementTree.SubElement(case, "failure", {"message": _xml(f"{wrong[one.name]}: {_said(one)}")})
                failure.text = _xml("\n".join(filter(None, (one.outcome.hint, one.remedy, one.outcome.detail))))
            elif one.outcome.kind == UNSUPPORTED:
                ElementTree.SubElement(case, "skipped", {"message": _xml(one.outcome.reason)})
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"

    # Text ----------------------------------------------------------------------------------------------------------
    def text(self) -> str:
        """Failures first, then a table by operator, what was declined, and the counts."""
        blocks = [self._failures(), self._listed(), self._operators(), self._declines(), self._end()]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def _failures(self) -> list[str]:
        """Each with its reason; the rest once for each operator and kind."""
        lines: list[str] = []
        told: set[tuple[str, str, str]] = set()
        for one, wrong in self.surprises:
            lines.append(f"{one.outcome.kind:11} {one.name}")
            if wrong != one.outcome.kind:
                lines += _folded(f"it {wrong}" if wrong.startswith("passes") else wrong)
            lines += _folded(one.outcome.reason)
            key = one.group, one.outcome.kind, one.checks
            if not one.outcome.good and key not in told:
                told.add(key)
                lines += _folded(one.checks and f"checks: {one.checks}") + _folded(one.outcome.hint)
                lines += _folded(one.remedy and f"to do: {one.remedy}")
                lines += [f"{'':14}| {line}" for line in _excerpt(one.outcome)]
        return lines

    def _listed(self) -> list[str]:
        lines = [f"expected, and no case is called so: {pattern}" for pattern in self.unmet]
        wrong = {one.name for one, _ in self.surprises}
        for one in self.results:
            entry = expected(one.name, self.entries)
            if entry is not None and one.name not in wrong:
                lines.append(f"expected {one.outcome.kind:11} {one.name}: {entry.reason}")
        return lines

    def _operators(self) -> list[str]:
        """Counts by operator or specimen, those with failures first; the ones that are declined altogether at last."""
        groups: dict[str, Counter[str]] = {}
        for one in self.results:
            groups.setdefault(one.group or "(the provider)", Counter())[one.outcome.kind] += 1
        served = {name: count for name, count in groups.items() if set(count) != {UNSUPPORTED}}
        order = sorted(served, key=lambda name: (-_failed(served[name]), name.lower()))
        if not order:
            return []
        rows = [[name, *(str(served[name][kind] or "") for kind in KINDS)] for name in order[:_OPERATORS]]
        lines = table(["operator", *KINDS], rows)
        if len(order) > _OPERATORS:
            lines.append(f"... and {len(order) - _OPERATORS} operators more; --json has all")
        if len(served) < len(groups):
            lines.append(f"declined altogether: {len(groups) - len(served)} of {len(groups)} operators")
        return lines

    def _declines(self) -> list[str]:
        reasons = Counter(one.outcome.reason for one in self.results if one.outcome.kind == UNSUPPORTED)
        if not reasons:
            return []
        rows = [[str(count), textwrap.shorten(reason, 100)] for reason, count in reasons.most_common(_DECLINES)]
        left = len(reasons) - len(rows)
        return [*table(["cases", "declined since"], rows), *([f"... and {left} reasons more"] if left else [])]

    def _end(self) -> list[str]:
        counted = "  ".join(f"{kind} {self.counts[kind]}" for kind in KINDS)
        lines = [f"{self.about['provider']}: {len(self.results)} cases in {self.seconds:.1f} s", counted]
        if self.ended:
            lines.append(f"NOT FINISHED: {self.ended}")
        output = self.about.get("output", {"lines": 0})
        if output["lines"]:
            count = f"{output['lines']} line{'' if output['lines'] == 1 else 's'}"
            lines += _folded(f"it wrote {count} to its output, the first: {output['first']}", 0)
        wrong = len(self.surprises)
        lines.append("as expected" if self.ok else f"{wrong} surprise{'' if wrong == 1 else 's'}")
        return lines


def _failed(counts: Counter[str]) -> int:
    return sum(count for kind, count in counts.items() if kind not in (PASS, UNSUPPORTED))


def _excerpt(outcome: Outcome) -> list[str]:
    """The lines that matter: a traceback has the innermost call last, and a stack first, of the thread that crashed, or
    else of the last one, the main thread, which calls the provider."""
    lines = outcome.detail.strip().splitlines()
    if outcome.kind not in (CRASH, HANG):
        return [line for line in lines if line.strip(" ~^")][-_DETAIL_LINES:]
    threads = [number for number, line in enumerate(lines) if _THREAD.match(line)]
    crashed = [number for number in threads if outcome.kind == CRASH and lines[number].startswith("Current")]
    begin = (crashed or threads or [0])[-1]
    return lines[begin : begin + _DETAIL_LINES]


def _said(one: Result) -> str:
    return one.outcome.reason or one.outcome.kind


def _xml(text: str) -> str:
    """Without the characters that XML cannot have."""
    return "".join(c if c in "\t\n\r" or 32 <= ord(c) < 0xD800 or ord(c) >= 0xE000 else "?" for c in text)


def _folded(text: str, indent: int = 12) -> list[str]:
    return textwrap.wrap(
        text, 110, initial_indent=indent * " ", subsequent_indent=(indent + 2) * " ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
