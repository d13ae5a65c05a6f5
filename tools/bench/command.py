"""`outrider bench`: the command line, and what is printed and kept.

Figures are worth little without what was measured beside them, so rows name their ratio to a baseline of the same
rounds, what the design allows, and whether that was kept.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from outrider.scheduler.errors import InvalidOptionError
from outrider.tools.bench.measure import Request, Row
from outrider.tools.bench.plot import svg
from outrider.tools.inputs import write_text
from outrider.tools.opening import SPECS, chosen_providers, model_path, progress
from outrider.tools.text import plain, table

# name -> what it measures; the modules are loaded when they are run.
BENCHES = {
    "hop": "a run through k workers, beside ZeroMQ, multiprocessing.Pipe and bare eventfds",
    "payload": "large tensors between workers, and the copies that a run makes",
    "profile": "where the microseconds of one hop go, step by step",
    "flight": "runs per second for 1 to 8 runs in flight",
    "stages": "two balanced stages, and two replicas, against one run after the other",
    "models": "the cpu provider beside other runtimes (MODEL ...; default @basic-pitch)",
    "ort": "the ort worker beside onnxruntime in process (MODEL ...; default @basic-pitch)",
    "nodes": "where the milliseconds of a model go in the cpu provider, node by node (MODEL ...)",
    "start": "start-up: import, workers, loading, the first run",
    "crash": "what a killed worker costs: until the error, until the right result, with a spare",
    "planning": "from claims to partitions, for growing graphs",
}
_PACKAGES = ("outrider", "numpy", "onnx", "onnxruntime", "pyzmq", "msgpack", "ray", "nxrt")
_LONGEST_NAME = 70


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure on this machine",
        description="Measure on this machine, side by side with baselines; every row states the design's budget.",
        epilog="  ".join(f"{name}: {what}." for name, what in BENCHES.items()),
    )
    parser.add_argument("what", choices=[*BENCHES, "all"], help="what to measure; `all` takes some minutes")
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=".onnx files, or folders of such, for `models`, `ort`, `nodes` and `all`",
    )
    parser.add_argument(
        "--feeds", metavar="FOLDER", help="inputs of the models, NAME.npz for NAME.onnx (default: beside it, else made)"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="`models`, `ort` and `nodes`: only with so many threads"
    )
    parser.add_argument(
        "--compiled", default="True", metavar="X", help="`nodes`: the cpu provider's option, as False or conv+gemm"
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--providers", metavar="LIST", help=f"`models`: also a session on these, in priority order: {SPECS}"
    )
    either.add_argument("--providers-file", metavar="FILE.toml", help="the same, listed as [[provider]] tables")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds to take the median of (default 7)")
    parser.add_argument("--quick", action="store_true", help="a few calls of everything: shows the rows, not the times")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the rows")
    parser.add_argument("--save", metavar="FOLDER", help="write BENCH.txt, BENCH.json and BENCH.svg there")
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Measure, print and keep. Exit code 0 whatever the figures are."""
    _check(args)
    models = [path for one in args.models or ["@basic-pitch"] for path in _models(model_path(one))]
    compiled = args.compiled if args.compiled not in ("True", "False") else args.compiled == "True"
    providers = chosen_providers(args) or ()
    request = Request(args.rounds, args.quick, models, args.feeds, args.threads, compiled, providers)
    documents: list[dict[str, Any]] = []
    drawn: list[tuple[str, list[Row]]] = []
    for name in list(BENCHES) if args.what == "all" else [args.what]:
        others = _Others()
        with progress(f"measuring {name}"):
            rows = importlib.import_module(f"outrider.tools.bench.{name}").rows(request)
        about = machine() | {"others": f"{others.share():.0%}", "rounds": args.rounds, "quick": args.quick}
        documents.append({"bench": name, "machine": about, "rows": [one.plain() for one in rows]})
        drawn.append((name, rows))
        text = "\n".join([*_table(rows), _footer(about)])
        if not args.json:
            print(f"{name}: {BENCHES[name]}\n{text}\n", flush=True)
        if args.save is not None:
            folder = Path(args.save)
            write_text(str(folder / f"{name}.txt"), f"outrider bench {name}\n\n{text}\n")
            write_text(str(folder / f"{name}.json"), json.dumps(plain(documents[-1]), indent=1) + "\n")
            write_text(str(folder / f"{name}.svg"), svg([(name, rows)]))
        if args.plot is not None:
            write_text(args.plot, svg(drawn))
    if args.json:
        print(json.dumps(plain(documents[0] if args.what != "all" else {"benches": documents}), indent=1))
    return 0


def _models(path: str) -> list[str]:
    """The path, or the models in it if it is a folder."""
    return sorted(map(str, Path(path).glob("*.onnx"))) if os.path.isdir(path) else [path]


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidOptionError for what would be ignored, or fail after minutes; make the folder to save to."""

    def refuse(name: str, value: Any, expected: str) -> NoReturn:
        raise InvalidOptionError(f"{name} {value}: expected {expected}.", name=name, value=value, expected=expected)

    if args.rounds < 1:
        refuse("--rounds", args.rounds, "at least 1")
    if args.threads is not None and args.threads < 1:
        refuse("--threads", args.threads, "at least 1")
    if args.what not in ("models", "ort", "nodes", "all"):
        for name, value in (("MODEL", " ".join(args.models)), ("--feeds", args.feeds), ("--threads", args.threads)):
            if value:
                refuse(name, value, f"none with {args.what}; it is for `models`, `ort`, `nodes` and `all`")
    for name, value in (("--providers", args.providers), ("--providers-file", args.providers_file)):
        if value is not None and args.what not in ("models", "all"):
            refuse(name, value, f"none with {args.what}; it is for `models` and `all`")
    for folder in filter(os.path.isdir, args.models):
        if not _models(folder):
            refuse("MODEL", folder, "a folder with .onnx files in it")
    if args.feeds is not None and not os.path.isdir(args.feeds):
        refuse("--feeds", args.feeds, "an existing folder")
    if args.plot is not None and not (args.plot.endswith(".svg") and os.path.isdir(os.path.dirname(args.plot) or ".")):
        refuse("--plot", args.plot, "a file name that ends in .svg, in an existing folder")
    if args.save is not None:
        try:
            os.makedirs(args.save, exist_ok=True)
        except OSError as error:
            refuse("--save", args.save, f"a folder that can be made ({error.strerror})")


class _Others:
    """How much of the processors other programs took since this was made: the reason of many a bad figure."""

    def __init__(self) -> None:
        self._busy, self._total = _processors()
        self._own = sum(os.times()[:4])

    def share(self) -> float:
        """0 to 1. Children count as ours once they have ended and been waited for."""
        busy, total = _processors()
        own = sum(os.times()[:4]) - self._own
        return max(0.0, busy - self._busy - own) / max(0.01, total - self._total)


def _processors() -> tuple[float, float]:
    """Seconds that all processors have worked, and that they have been there, since the machine started."""
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]  # user ... idle, iowait ... steal
    second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / second, sum(ticks) / second


def machine() -> dict[str, Any]:
    """What a figure needs to be read: processor, cores, versions."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    facts: dict[str, Any] = {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def _footer(about: Mapping[str, Any]) -> str:
    return "\n".join(textwrap.wrap(", ".join(f"{key} {value}" for key, value in about.items()), 120))


def _table(rows: Sequence[Row]) -> list[str]:
    """Lines of the columns that any row fills."""
    columns = {
        "what": [row.what[:_LONGEST_NAME] for row in rows],
        "median": [_number(row.value) for row in rows],
        "unit": [row.unit if row.value is not None else "" for row in rows],
        "rounds": [_span(row) for row in rows],
        "p99": [_number(row.p99) for row in rows],
        "ratio": [_number(row.ratio) for row in rows],
        "to": [row.to if row.ratio is not None else "" for row in rows],
        "budget": [row.budget for row in rows],
        "": [row.verdict for row in rows],
        "note": [row.note for row in rows],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return table(list(kept), [list(cells) for cells in zip(*kept.values(), strict=True)])


def _span(row: Row) -> str:
    return "" if row.low is None or row.low == row.high else f"{_number(row.low)} - {_number(row.high)}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == int(value) and abs(value) < 100:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
