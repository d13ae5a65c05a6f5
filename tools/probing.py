"""`outrider doctor --probe SPEC`: one provider in a throw-away worker, started and asked what it claims.

Without a model it is asked about a set of common operators, each in a graph of its own, as some providers take all of
what they are shown or nothing. What comes out is kept as the verdict that fleets go by (`outrider.scheduler.verdicts`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.providers.wire.failures import text_of
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.errors import OutriderError
from outrider.scheduler.options import ProviderSpec, SessionOptions
from outrider.tools.opening import SPECS, model_path, one_provider, progress
from outrider.tools.text import milliseconds, plain, visible

if TYPE_CHECKING:  # doctor may be asked which packages are missing
    from onnx import ModelProto

    from outrider.providers.wire import messages
    from outrider.providers.wire.graph import Graph
    from outrider.scheduler import Fleet
    from outrider.scheduler.model import LoadedModel
    from outrider.scheduler.verdicts import Verdict
    from outrider.scheduler.worker import Worker

FAILED = 3
DEADLINE = 60.0  # seconds, to start and to answer
_BUILT_IN_SET = "the built-in set"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--probe and what goes with it."""
    group = parser.add_argument_group("one provider")
    group.add_argument("--probe", metavar="SPEC", help="start this provider and ask what it claims, in a worker that "
                       f"is thrown away: {SPECS}; or its name in --providers-file")  # fmt: skip
    group.add_argument("--model", metavar="MODEL", help="ask about this model instead of a set of common operators")
    group.add_argument("--deadline", type=float, default=DEADLINE, metavar="SECONDS",
                       help=f"to start in, and again to answer in (default: {DEADLINE:g})")  # fmt: skip


def probe(args: argparse.Namespace) -> int:
    """Exit code 0 if the provider starts and answers, else 3."""
    if not args.deadline > 0:
        raise invalid_option("--deadline", args.deadline, "a positive number of seconds")
    spec = one_provider(args.probe, args.providers_file)
    path = None if args.model is None else model_path(args.model)
    with progress(f"probing {spec.display}"):
        document = examined(spec, path, args.deadline)
    print(json.dumps(plain(document), indent=2) if args.json else visible("\n".join(_text(document))))
    return 0 if document["ok"] else FAILED


def examined(spec: ProviderSpec, path: str | None, deadline: float) -> dict[str, Any]:
    """What a probe of this provider sees, as plain data. `path`: of a model to ask about; `deadline`: in seconds.

    {provider, ok, failure, start_seconds, versions, attributes, claims, kept}. `failure`: {cause, phase, reason,
    signal, exit_code, story} or None; `claims`: {asked, nodes, claimed, reference, operators, declines, error,
    traceback, seconds} or None; `kept`: the file of the verdict. Raises the errors of models, before anything starts.
    """
    from outrider.scheduler import Fleet, verdicts
    from outrider.scheduler.model import load_model
    from outrider.scheduler.probing import start_verdict

    loaded = load_model(common_operators() if path is None else path)
    document: dict[str, Any] = {"provider": spec.display, "ok": False, "failure": None, "start_seconds": None}
    document["claims"] = None
    start = time.perf_counter()
    try:
        options = SessionOptions(start_deadline=deadline)
        with Fleet._of([dataclasses.replace(spec, required=False)], options, None, probe=False) as fleet:
            (worker,) = fleet.monitor.workers
            seconds, hello = time.perf_counter() - start, worker.hello
            if hello is None:
                verdict = start_verdict(worker, fleet.absent[worker.name], deadline)
            else:
                document["start_seconds"] = seconds
                document["versions"] = dict(hello.versions)
                document["attributes"] = dict(hello.declares)
                verdict, document["claims"] = _claims(fleet, worker, loaded, path, deadline)
    finally:
        loaded.store.close()
    claims = document["claims"]
    document["ok"] = claims is not None and claims["error"] is None
    if not verdict.good:
        told = ("cause", "phase", "reason", "signal", "exit_code", "story")
        document["failure"] = {name: getattr(verdict, name) for name in told}
    over_the_model = path is not None and verdict.phase == "claim"  # it may do for other models
    document["kept"] = None if over_the_model else verdicts.keep(spec, verdict)
    return document


def _claims(
    fleet: Fleet, worker: Worker, loaded: LoadedModel, path: str | None, deadline: float
) -> tuple[Verdict, dict[str, Any] | None]:
    """Ask what the provider claims; the verdict, and the answer as plain data, None if there is none."""
    from outrider.providers.wire import messages
    from outrider.providers.wire.pack import pack_graph
    from outrider.scheduler.placement import left_over
    from outrider.scheduler.probing import claim_verdict, hand_over
    from outrider.scheduler.verdicts import Verdict

    graph = loaded.graph
    shown = [graph] if path is not None else [left_over(graph, [i]) for i in range(len(graph.nodes))]
    session = fleet.next_session()
    weights, model = hand_over(fleet.monitor, worker, loaded)
    asked: list[concurrent.futures.Future[messages.Claims]] = []
    start = time.perf_counter()
    for number, one in enumerate(shown, 1):
        message = messages.Claim(session, number, pack_graph(one), weights, model)
        asked.append(fleet.monitor.request(worker, message, ("Claims", session, number)))
    verdict = Verdict()
    for future in asked:
        verdict = claim_verdict(fleet.monitor, worker, future, start + deadline - time.perf_counter(), deadline)
        if not verdict.good:
            return verdict, None
    answers = [future.result() for future in asked]
    return verdict, _answered(worker, graph, path, shown, answers, time.perf_counter() - start)


def _answered(
    worker: Worker,
    graph: Graph,
    path: str | None,
    shown: Sequence[Graph],
    answers: Sequence[messages.Claims],
    seconds: float,
) -> dict[str, Any]:
    """What the provider said, checked as a session would."""
    from outrider.scheduler.placement import Answers
    from outrider.scheduler.report import Refusal, group_declines

    said, error, traceback = Answers(), None, None
    for one, answer in zip(shown, answers, strict=False):
        if answer.error is not None:
            if error is None:
                error = f"claim() raised {answer.error.get('type')}: {answer.error.get('message')}"
                traceback = text_of(answer.error.get("traceback") or "")
            continue
        try:
            said.add(0, worker.name, one, answer)
        except OutriderError as broken:
            error = error or str(broken)
    claimed = [node for node in graph.nodes if said.claimed(0, node.name)]
    declined = [node for node in graph.nodes if not said.claimed(0, node.name)] if answers else []
    groups = group_declines(
        Refusal(node.name, node.op_type, node.domain, worker.name, said.reason(0, node.name)) for node in declined
    )
    return {
        "asked": path or _BUILT_IN_SET,
        "nodes": len(graph.nodes),
        "claimed": len(claimed),
        "reference": sum(said.reference(0, node.name) for node in claimed),
        "operators": dict(sorted(Counter(node.label for node in claimed).items())),
        "declines": [one.to_dict() for one in groups],
        "error": error,
        "traceback": traceback,
        "seconds": seconds,
    }


def _text(document: dict[str, Any]) -> list[str]:
    lines = _row("provider", document["provider"])
    if document["start_seconds"] is not None:
        lines += _row("starts", f"in {milliseconds(document['start_seconds'])}")
        lines += _row("versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items()))
        lines += _row("declares", _declared(document["attributes"]))
    failure, claims = document["failure"], document["claims"]
    if failure is not None:
        lines += _row("FAILS", failure["reason"])
        lines += failure["story"].splitlines()
    elif claims is not None:
        lines += _claims_text(claims)
    if document["kept"] is not None:
        lines += _row("remembered", f"as {'fit' if failure is None else 'not fit'} for use, in {document['kept']}")
    return lines


def _declared(attributes: dict[str, Any]) -> str:
    """What a provider says of itself: which options of the contract it uses, and what nodes it can be given."""
    told = dict(attributes)
    dtypes, shapes = told.pop("dtypes", None), told.pop("shapes", "any")
    names = dtypes if isinstance(dtypes, list) else [dtypes]
    parts = ["accepts all dtypes" if dtypes is None else f"accepts {', '.join(map(str, names))}"]
    if shapes != "any":
        parts.append(f"{shapes} shapes only")
    parts += [f"no {kind}" for kind in ("sequences", "maps", "optionals", "bodies") if not told.pop(kind, True)]
    return "; ".join(parts + [name for name, used in told.items() if used])


def _claims_text(claims: dict[str, Any]) -> list[str]:
    if claims["error"] is not None:
        return [*_row("FAILS", claims["error"]), *(claims["traceback"] or "").splitlines()]
    stop_gap = f", {claims['reference']} of them by a stop-gap" if claims["reference"] else ""
    count = f"{claims['claimed']} of {claims['nodes']} nodes of {claims['asked']}{stop_gap}"
    lines = _row("claims", f"{count}, asked in {milliseconds(claims['seconds'])}")
    lines += _row("", _counted(claims["operators"]))
    by_reason: dict[str, dict[str, int]] = {}
    for one in claims["declines"]:
        by_reason.setdefault(one["reason"], {})[f"{one['domain']}::{one['op']}"] = one["count"]
    for reason, operators in by_reason.items():
        lines += _row("declines", f"{reason}: {_counted(operators)}")
    return lines


def _counted(operators: dict[str, int]) -> str:
    """'Add 3, com.acme::Glue': the default domain and a count of one are left out."""
    return ", ".join(
        label.removeprefix("ai.onnx::") + (f" {count}" if count > 1 else "") for label, count in operators.items()
    )


def _row(title: str, text: str) -> list[str]:
    """A title and its text, folded; nothing without text."""
    if not text:
        return []
    return textwrap.wrap(
        text, 110, initial_indent=f"{title:13}", subsequent_indent=13 * " ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def common_operators() -> ModelProto:
    """A ModelProto with one node of each of some common operators, with the shapes and constants they usually have.

    The nodes are named after their operators and share nothing.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    image, matrix, floats = [1, 8, 16, 16], [4, 8], TensorProto.FLOAT
    many, few = np.ones(8, np.float32), np.ones((8, 8, 3, 3), np.float32)
    square, scale, zero = np.ones((8, 8), np.float32), np.array(0.1, np.float32), np.array(0, np.uint8)

    def index(*items: int) -> Any:
        return np.array(items, np.int64)

    # operator: (shape of the input, constants after it, attributes, dtype of the output)
    wanted: dict[str, tuple[list[int], list[Any], dict[str, Any], int]] = {
        "Add": (matrix, [many], {}, floats),
        "AveragePool": (image, [], {"kernel_shape": [2, 2]}, floats),
        "BatchNormalization": (image, [many, many, many, many], {}, floats),
        "Cast": (matrix, [], {"to": TensorProto.INT64}, TensorProto.INT64),
        "Concat": (matrix, [np.ones((4, 8), np.float32)], {"axis": 0}, floats),
        "Conv": (image, [few, many], {"pads": [1, 1, 1, 1]}, floats),
        "ConvTranspose": (image, [few], {}, floats),
        "Gather": (matrix, [index(0, 2)], {"axis": 0}, floats),
        "Gelu": (matrix, [], {}, floats),
        "Gemm": (matrix, [square, many], {}, floats),
        "GlobalAveragePool": (image, [], {}, floats),
        "LayerNormalization": (matrix, [many, many], {}, floats),
        "MatMul": (matrix, [square], {}, floats),
        "MaxPool": (image, [], {"kernel_shape": [2, 2], "strides": [2, 2]}, floats),
        "Mul": (matrix, [many], {}, floats),
        "QuantizeLinear": (matrix, [scale, zero], {}, TensorProto.UINT8),
        "ReduceMean": (matrix, [index(1)], {}, floats),
        "Relu": (matrix, [], {}, floats),
        "Reshape": (matrix, [index(8, 4)], {}, floats),
        "Sigmoid": (matrix, [], {}, floats),
        "Slice": (matrix, [index(0), index(2), index(0)], {}, floats),
        "Softmax": (matrix, [], {"axis": -1}, floats),
        "Tanh": (matrix, [], {}, floats),
        "Transpose": (matrix, [], {"perm": [1, 0]}, floats),
    }
    nodes, inputs, outputs, initializers = [], [], [], []
    for op, (shape, constants, attributes, dtype) in wanted.items():
        names = [f"{op}.{number}" for number in range(1 + len(constants))]
        nodes.append(helper.make_node(op, names, [f"{op}.y"], name=op, **attributes))
        inputs.append(helper.make_tensor_value_info(names[0], floats, shape))
        outputs.append(helper.make_tensor_value_info(f"{op}.y", dtype, None))
        initializers += [numpy_helper.from_array(one, name) for one, name in zip(constants, names[1:], strict=True)]
    graph = helper.make_graph(nodes, "common operators", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
