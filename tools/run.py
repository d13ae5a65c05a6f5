"""`outrider run`: run a model, show its outputs, compare them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.scheduler.errors import InvalidOptionError, KernelError, OutputNotFoundError
from outrider.scheduler.nodearg import NodeArg
from outrider.scheduler.report import PlacementReport
from outrider.scheduler.trace import VARIABLE, unwritable
from outrider.tools.agree import TOLERANCE, agree
from outrider.tools.inputs import (
    DataFileError,
    flatten,
    free_dimensions,
    make_inputs,
    read_inputs,
    read_npz,
    restore,
    write_npz,
)
from outrider.tools.opening import add_model_arguments, model_path, open_session, parse_pairs, progress
from outrider.tools.text import milliseconds, plain, row, summarize, table, visible


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser("run", help="run a model", description="Run a model over worker processes.")
    add_model_arguments(parser)
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--input", action="append", default=[], metavar="NAME=FILE.npy", help="an input; may be repeated"
    )
    given.add_argument("--feed", metavar="FILE.npz", help="all inputs; keys are their names")
    parser.add_argument(
        "--dim", action="append", default=[], metavar="NAME=SIZE",
        help="a free dimension of inputs that are made: its symbol, or INPUT.AXIS for one without (default: 1)"
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of inputs that are made (default: 0)")
    parser.add_argument("--expect", metavar="FILE.npz", help="compare with these outputs; exit code 1 if they differ")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, metavar="T",
        help="max|difference| that agrees, as a share of max|expected| (default: 1e-3)",
    )  # fmt: skip
    parser.add_argument("--save", metavar="FILE.npz", help="write the outputs")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run N times and tell the median time")
    parser.add_argument(
        "--trace", metavar="FILE.json", help="write a trace of this command, for ui.perfetto.dev or chrome://tracing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 if outputs differ from those expected."""
    if args.repeat < 1:
        _refuse("--repeat", args.repeat, "at least 1")
    if args.seed < 0:
        _refuse("--seed", args.seed, "at least 0")
    if not args.tolerance >= 0:
        _refuse("--tolerance", args.tolerance, "a number of at least 0")
    dims = _dims(args.dim)
    made = args.feed is None and not args.input
    if dims and not made:
        _refuse("--dim", args.dim, "inputs that are made, not read from files")
    _protect(args)
    # All files before any process.
    arrays = read_npz(args.feed) if args.feed is not None else read_inputs(args.input)
    expected = None if args.expect is None else read_npz(args.expect)
    with _opened(args) as session:
        signature = session.get_inputs()
        if made:
            feed = make_inputs(signature, args.seed, dims)
        else:
            types = {arg.name: arg.dtype for arg in [*signature, *session.get_overridable_initializers()]}
            feed = {name: restore(array, types.get(name, "")) for name, array in arrays.items()}
        outputs = session.get_outputs()
        names = [arg.name for arg in outputs]
        compared = _expectations(expected, names)
        seconds = []
        with progress(f"running {os.path.basename(args.model)}"):
            for _ in range(args.repeat):
                start = time.perf_counter()
                values = _run_once(session, feed, signature if made else [], dims)
                seconds.append(time.perf_counter() - start)
        results = dict(zip(names, values, strict=True))
        dtypes = {arg.name: arg.dtype for arg in outputs}
        verdicts = _compare(results, compared, dtypes, args.tolerance)
        if args.save is not None:
            write_npz(args.save, results)
        facts = {
            "model": args.model,
            "inputs": {name: summarize(value) for name, value in feed.items()},
            "inputs_made": made,
            "outputs": {name: summarize(value) for name, value in results.items()},
            "seconds": _times(seconds),
            "placement": session.placement(),
            "stats": session.stats(),
            "expected": verdicts,
        }
    differs = any(reason is not None for reason in verdicts.values())
    if args.json:
        document = {
            **facts,
            "placement": facts["placement"].to_dict(),
            "agrees": None if expected is None else not differs,
        }
        print(json.dumps(plain(document), indent=2))
    else:
        print(visible("\n".join(_text(facts, expected is not None, args.save, args.trace))))
    return 1 if differs else 0


@contextlib.contextmanager
def _opened(args: argparse.Namespace) -> Iterator[Any]:
    """The session; its trace is written whatever ends the runs."""
    if args.trace is None:
        with open_session(args) as session:
            yield session
        return
    reason = unwritable(os.path.abspath(args.trace))
    if reason:
        raise DataFileError(f"cannot write {args.trace}: {reason}.", path=args.trace, reason=reason)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = args.trace  # so that it begins with the loading of the model
    try:
        opened = open_session(args)
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    with opened as session:
        try:
            yield session
        finally:
            session.stop_trace(args.trace)


def _run_once(session: Any, feed: Mapping[str, Any], made: Sequence[NodeArg], dims: Mapping[str, int]) -> Any:
    """One run. `made`: the inputs that are our own guess, which the error of a kernel then mentions."""
    try:
        return session.run(None, feed)
    except KernelError as error:
        if not made:
            raise
        free = [name for name in free_dimensions(made) if name not in dims]
        guess = f"size 1 for {', '.join(free)}, integers 0 or 1" if free else "integers 0 or 1"
        remedy = f"give {'other sizes with --dim NAME=SIZE, or ' if free else ''}inputs with --input or --feed"
        story = f"{error.message}. The inputs were made, with {guess}: {remedy}."
        raise KernelError(story, **error.fields()) from error


def _refuse(name: str, value: Any, expected: str) -> None:
    raise InvalidOptionError(f"{name} {value}: expected {expected}.", name=name, value=value, expected=expected)


def _dims(texts: list[str]) -> dict[str, int]:
    sizes = {}
    for name, text in parse_pairs("--dim", texts).items():
        if not (text.isascii() and text.isdecimal()):
            _refuse(f"--dim {name}", text, "a size of at least 0")
        sizes[name] = int(text)
    return sizes


def _protect(args: argparse.Namespace) -> None:
    """--save and --trace must not overwrite what was read."""
    for name, written in (("--save", args.save), ("--trace", args.trace)):
        if written is None or not os.path.exists(written):
            continue
        for path in (model_path(args.model), args.feed, args.expect, *parse_pairs("--input", args.input).values()):
            if path is not None and os.path.exists(path) and os.path.samefile(written, path):
                _refuse(name, written, "another file than those that are read")


def _expectations(expected: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The arrays of --expect by output: those named after it, and after its items (`y[0]`)."""
    by_output: dict[str, dict[str, Any]] = {}
    for key, array in (expected or {}).items():
        output = key if key in names else next((name for name in names if key.startswith(f"{name}[")), None)
        if output is None:
            known = ", ".join(names)
            message = f"--expect holds {key!r}, but the model has no such output; it has {known}."
            raise OutputNotFoundError(message, name=key, known=list(names))
        by_output.setdefault(output, {})[key] = array
    return by_output


def _compare(
    results: Mapping[str, Any], compared: Mapping[str, Mapping[str, Any]], dtypes: Mapping[str, str], tolerance: float
) -> dict[str, str | None]:
    """output -> None if it agrees, else the reason."""
    verdicts: dict[str, str | None] = {}
    for output, arrays in compared.items():
        ours = dict(flatten(output, results[output]))
        theirs = {key: restore(array, dtypes[output]) for key, array in arrays.items()}
        verdicts[output] = agree(ours[output], theirs[output], tolerance) if output in ours and output in theirs else (
            agree(ours, theirs, tolerance)
        )  # fmt: skip
    return verdicts


def _times(seconds: Sequence[float]) -> dict[str, Any]:
    """The first run binds kernels to shapes and is told apart; the median is over the others."""
    later = seconds[1:] or seconds
    return {"runs": len(seconds), "first": seconds[0], "median": statistics.median(later), "min": min(later)}


def _text(facts: Mapping[str, Any], comparing: bool, saved: str | None, traced: str | None) -> list[str]:
    report: PlacementReport = facts["placement"]
    lines = [report.summary()]
    rows = [[one.name, one.story, str(one.nodes), f"{one.weight_bytes:,}"] for one in report.providers]
    lines += table(["worker", "state", "nodes", "weight bytes"], rows)
    served = report.reference_nodes
    if served:
        lines.append(f"{len(served)} nodes are served by onnx.reference, a slow stop-gap")
    lines += [f"note: {note}" for note in report.notes]
    how = " (made; give your own with --input or --feed)" if facts["inputs_made"] else ""
    lines += ["", *table([f"input{how}", "dtype", "shape", "values"], _rows(facts["inputs"]))]
    lines += ["", *table(["output", "dtype", "shape", "values"], _rows(facts["outputs"])), ""]
    times = facts["seconds"]
    if times["runs"] == 1:
        lines.append(f"1 run: {milliseconds(times['first'])}, including the binding of kernels to these shapes")
    else:
        first, median, least = (milliseconds(times[key]) for key in ("first", "median", "min"))
        lines.append(f"{times['runs']} runs: first {first}, then median {median}, least {least}")
    if saved is not None:
        lines.append(f"outputs written to {saved}")
    if traced is not None:
        lines.append(f"trace written to {traced}; open it in ui.perfetto.dev or chrome://tracing")
    if comparing:
        for output in facts["outputs"]:
            reason = facts["expected"].get(output, "not compared, --expect does not hold it")
            lines.append(f"{output}: {reason or 'agrees'}")
    return lines


def _rows(summaries: Mapping[str, Any]) -> list[list[str]]:
    return [row(name, facts) for name, facts in summaries.items()]
