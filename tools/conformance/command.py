"""`outrider conformance SPEC`: the command line.

Exit codes: 0 nothing but PASS, UNSUPPORTED and what was expected; 1 anything else; 2 bad usage; 3 the provider does not
start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from outrider.scheduler.checked import invalid_option
from outrider.scheduler.errors import InvalidOptionError
from outrider.tools.opening import SPECS, one_provider
from outrider.tools.text import plain, visible

DEADLINE = 10.0  # seconds


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "conformance",
        help="try a provider on contract and operator cases",
        description="Contract and operator cases against any provider, in its own process. Each ends as PASS, "
        "UNSUPPORTED (the provider declines), MISMATCH, ERROR, CRASH or HANG.",
        epilog="Exit codes: 0 nothing but PASS, UNSUPPORTED and what was expected; 1 anything else; 2 bad usage; "
        "3 the provider does not start.",
    )
    parser.add_argument("spec", metavar="SPEC", help=f"the provider: {SPECS}")
    parser.add_argument("--providers-file", metavar="FILE.toml", help="SPEC is the name of a provider in this file")
    parser.add_argument("--quick", action="store_true", help="without the cases of ONNX's backend suite")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN",
                        help="cases whose names match, as 'contract/*' or '*softmax*'; may be repeated")  # fmt: skip
    parser.add_argument("--ops", metavar="LIST", help="cases with one of these operators, as Add,MatMul")
    parser.add_argument("--dtypes", metavar="LIST", help="cases with one of these element types, as float32,int64")
    parser.add_argument("--opsets", metavar="LIST", help="cases of these opsets, as 13,17-21")
    parser.add_argument("--shapes-only", action="store_true",
                        help="compare dtypes and shapes and no values, as for null; no contract cases")  # fmt: skip
    parser.add_argument("--deadline", type=float, default=DEADLINE, metavar="SECONDS",
                        help=f"for each start, claim, loading and run (default: {DEADLINE:g})")  # fmt: skip
    parser.add_argument("--expect", metavar="FILE", help="expected failures, in TOML")
    parser.add_argument("--write-expect", metavar="FILE", help="write what failed as a file of expected failures")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit's XML too")
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Run the cases and print what came of them."""
    from outrider.tools.conformance.cases import MOST_HANGS, Result, results
    from outrider.tools.conformance.expectations import read_expectations, write_expectations
    from outrider.tools.conformance.operators import Selection
    from outrider.tools.conformance.outcomes import HANG
    from outrider.tools.conformance.report import Report
    from outrider.tools.conformance.running import Rig
    from outrider.tools.inputs import write_text

    if not args.deadline > 0:
        raise invalid_option("--deadline", args.deadline, "a positive number of seconds")
    selection = Selection(
        tuple(args.only), _names(args.ops), frozenset(one.lower() for one in _names(args.dtypes)), _opsets(args.opsets)
    )
    entries = () if args.expect is None else read_expectations(args.expect)
    spec = one_provider(args.spec, args.providers_file)
    found: list[Result] = []
    begun = time.monotonic()
    with Rig(spec, args.deadline) as rig, _progress(spec.display) as tell:
        about = _about(rig)
        for one in results(rig, selection, args.quick, args.shapes_only, lambda name: tell(f"{len(found)} {name}")):
            found.append(one)
    about["output"] = {"lines": rig.output.lines, "first": rig.output.first}
    if not found:
        asked = " or ".join(sorted(selection.operators))
        told = f"no case is selected{f': none that is asked for has {asked}' if asked else ''}."
        raise InvalidOptionError(told, name="--only", value="", expected="a pattern that fits a case")
    hangs = sum(one.outcome.kind == HANG for one in found)
    ended = f"{hangs} cases hung, and the others were not tried" if hangs >= MOST_HANGS else ""
    whole = selection == Selection() and not (args.quick or args.shapes_only)
    report = Report(about, found, entries, whole, ended, time.monotonic() - begun)
    if args.write_expect is not None:
        write_expectations(args.write_expect, found, entries)
    if args.junit is not None:
        write_text(args.junit, report.junit())
    print(json.dumps(plain(report.plain()), indent=1) if args.json else visible(report.text()))
    return 0 if report.ok else 1


def _about(rig: Any) -> dict[str, Any]:
    hello = rig.worker.hello
    return {"provider": rig.name, "versions": dict(hello.versions), "attributes": dict(hello.declares)}


def _names(text: str | None) -> frozenset[str]:
    return frozenset(one.strip() for one in (text or "").split(",") if one.strip())


def _opsets(text: str | None) -> frozenset[int]:
    """'13,17-21' as numbers. Raises InvalidOptionError."""
    found: set[int] = set()
    for one in _names(text):
        low, dash, high = one.partition("-")
        if not (low.isdecimal() and (high.isdecimal() if dash else True)):
            raise invalid_option("--opsets", text, "numbers and ranges of numbers, as 13,17-21")
        found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


@contextlib.contextmanager
def _progress(provider: str) -> Iterator[Callable[[str], None]]:
    """Something that shows on a terminal which case runs."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(f"trying {provider}")) as status:
        yield lambda text: status.update(Text(text))
