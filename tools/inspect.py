"""`outrider inspect`: where each node of a model would run, and why, without running it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from outrider.scheduler.errors import InvalidOptionError
from outrider.scheduler.nodearg import NodeArg
from outrider.scheduler.report import PlacedNode
from outrider.tools.inputs import write_text
from outrider.tools.opening import add_model_arguments, open_session
from outrider.tools.text import plain, table, visible


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser("inspect", help="show the placement", description="Place a model without running it.")
    add_model_arguments(parser)
    parser.add_argument(
        "--nodes", nargs="?", const="*", metavar="PATTERN",
        help="also list the nodes, or those of this name or pattern: who has them, who claimed them at what cost, and "
        "who declined them and why",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE", help="also write the report as a page")
    parser.set_defaults(command=inspect)


def inspect(args: argparse.Namespace) -> int:
    """Exit code 0."""
    with open_session(args) as session:
        report = session.placement()
        inputs, outputs = session.get_inputs(), session.get_outputs()
    listed = [] if args.nodes is None else report.matching(args.nodes)
    if args.nodes is not None and not listed:
        raise InvalidOptionError(
            f"--nodes {args.nodes}: no node has a name like that.", name="--nodes", value=args.nodes, expected="a node"
        )
    if args.html is not None:
        write_text(args.html, report.to_html(f"Placement of {args.model}"))
    if args.json:
        document = {
            "model": args.model,
            "inputs": [_described(arg) for arg in inputs],
            "outputs": [_described(arg) for arg in outputs],
            **report.to_dict(),
            "notes": list(report.notes),
        }
        print(json.dumps(plain(document), indent=2))
        return 0
    rows = [["input", arg.name, arg.type, str(arg.shape)] for arg in inputs]
    rows += [["output", arg.name, arg.type, str(arg.shape)] for arg in outputs]
    lines = [*table(["", "name", "type", "shape"], rows), "", str(report)]
    if listed:
        header = ["node", "operator", "has it", "claimed by, cost", "declined by"]
        lines += ["", *table(header, [_row(one) for one in listed])]
    print(visible("\n".join(lines)))
    return 0


def _row(one: PlacedNode) -> list[str]:
    return [one.name, one.label, one.place, "; ".join(map(str, one.claims)), "; ".join(map(str, one.declines))]


def _described(arg: NodeArg) -> dict[str, Any]:
    return {"name": arg.name, "type": arg.type, "shape": arg.shape, "dtype": arg.dtype}
