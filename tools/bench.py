"""`outrider bench`: what Outrider costs on this machine, as medians and ratios measured in one run.

Figures are worth little without what was measured beside them, so every row names its ratio to a baseline of the same
rounds. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from typing import Any

from outrider.tools.text import table

BENCHES = {"hop": "bench_hop", "planning": "bench_planning"}  # modules, loaded when they are run


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure transport and planning on this machine",
        description="Measure on this machine. hop: a run through k workers, beside a ZeroMQ echo. "
        "planning: from claims to partitions, for growing graphs.",
    )
    parser.add_argument("what", choices=sorted(BENCHES), help="what to measure")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds to take the median of (default 7)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.set_defaults(command=command)


def machine() -> dict[str, Any]:
    """What a figure needs to be read: processor, cores, load, versions."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def command(args: argparse.Namespace) -> int:
    """Measure and print."""
    rows = importlib.import_module(f"outrider.tools.{BENCHES[args.what]}").rows(max(1, args.rounds))
    if args.json:
        print(json.dumps({"bench": args.what, "machine": machine(), "rows": rows}, indent=1))
        return 0
    header = list(rows[0])
    print("\n".join(table(header, [[_cell(row[name]) for name in header] for row in rows])))
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    return 0


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
