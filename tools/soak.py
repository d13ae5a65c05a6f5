"""A soak on the command line: workers are killed at random while several threads run a model that is cut among them.

    python -m outrider.tools.soak MODEL --save tools/results

Every answer is compared, bit for bit, with that of the same session before the first kill. Errors must be of the kinds
that the policy allows; there must be an end; and memory, descriptors, threads and segments must not grow.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.scheduler import InferenceSession
from outrider.tools.inputs import make_inputs, read_npz, write_text
from outrider.tools.opening import model_path, parse_pairs
from outrider.tools.soaking import SIGNALS, Feed, Plan, Soak

FEEDS = 8  # different inputs, if they are made


def summary(told: Mapping[str, Any]) -> str:
    """A few lines for people."""
    times, growth = told["run_ms"], told["growth"]
    failed = ", ".join(f"{count} {kind}" for kind, count in told["errors"].items()) or "no errors"
    killed = ", ".join(f"{count} {name}" for name, count in told["kills"].items())
    grown = ", ".join(f"{name} {by:+,.0f}" for name, by in growth.items())
    return "\n".join([
        f"{told['runs']:,} runs over {told['partitions']} partitions in {told['seconds']:,.0f} s; kills: {killed}",
        f"{told['right']:,} right, {told['wrong']} wrong, {failed}",
        f"a run took {times['p50']:g} ms (p50), {times['p99']:g} ms (p99), {times['most']:g} ms at most",
        f"growth: {grown}",
        *(f"FAULT: {one}" for one in told["faults"]),
    ])  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.tools.soak",
        description="Kill workers at random while threads run a model, and see that every answer is right.",
        epilog="Exit codes: 0 nothing to find fault with, 1 something, 4 a hang.",
    )
    plan = Plan()
    parser.add_argument("model", nargs="?", default="@basic-pitch", help="a .onnx file (default: @basic-pitch)")
    parser.add_argument("--feed", action="append", default=[], metavar="FILE.npz", help="an input; may be repeated")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=N", help="a free dimension of made inputs")
    for name in ("runs", "kills", "callers", "workers", "stretches", "seed", "spares"):
        value = getattr(plan, name)
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"default {value}")
    parser.add_argument("--again", type=float, default=0.0, metavar="SHARE", help="kills followed by one of the next")
    parser.add_argument("--signals", default="SIGKILL", metavar="LIST", help=f"of {', '.join(SIGNALS)}")
    parser.add_argument("--partition-deadline", type=float, metavar="SECONDS", help="needed with SIGSTOP")
    parser.add_argument("--patience", type=float, default=plan.patience, metavar="SECONDS", help="until it is a hang")
    parser.add_argument("--no-replay", dest="replay", action="store_false", help="SessionOptions(replay=False)")
    parser.add_argument("--no-fallback", dest="fallback", action="store_false", help="SessionOptions(fallback=False)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", metavar="FOLDER", help="write soak.json there")
    return parser


def _plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Plan:
    signals = tuple(args.signals.split(","))
    if not set(signals) <= set(SIGNALS):
        parser.error(f"--signals {args.signals}: expected some of {','.join(SIGNALS)}")
    if "SIGSTOP" in signals and args.partition_deadline is None:
        parser.error("--signals SIGSTOP: set --partition-deadline too, or nobody will miss a stopped worker")
    given = {name: getattr(args, name) for name in asdict(Plan()) if name != "signals"}
    return Plan(signals=signals, **given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print and keep what came of it."""
    parser = _parser()
    args = parser.parse_args(arguments)
    plan, path = _plan(parser, args), model_path(args.model)
    logging.getLogger("outrider").addHandler(logging.NullHandler())  # deaths are counted, not told one by one
    feeds: list[Feed] = [read_npz(file) for file in args.feed]
    if not feeds:
        with InferenceSession(path) as session:
            dims = {name: int(size) for name, size in parse_pairs("--dim", args.dim).items()}
            feeds = [make_inputs(session.get_inputs(), seed, dims) for seed in range(FEEDS)]
    told = {"soak": os.path.basename(path), **Soak(path, feeds, plan).run()}
    print(json.dumps(told, indent=1) if args.json else summary(told))
    if args.save is not None:
        write_text(str(Path(args.save) / "soak.json"), json.dumps(told, indent=1) + "\n")
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
