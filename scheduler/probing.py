"""Providers of somebody else's are probed before they are used for the first time.

A fleet that starts looks for the verdict of an earlier probe (`verdicts.py`). A provider that did badly is refused
without being started. One that nobody has probed is started and, before any session sees it, asked what it claims of a
small graph: its worker becomes the fleet's if it answers. If it dies or is late instead, the provider is refused, and
the next fleet knows. What it answers is of no interest: claims are checked when they matter.

Not probed are the providers of this package, except `ort` with a library, or with an execution provider other than ONNX
Runtime's own for CPUs; and those with `ProviderSpec(debug=True)`, which are to be looked at while they crash.
`OUTRIDER_PROBE=0` in the environment turns all of this off.
"""

from __future__ import annotations

import concurrent.futures
import os
import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from onnx import TensorProto, helper

from outrider.providers.contract import ProviderUnavailableError
from outrider.providers.wire import messages
from outrider.providers.wire.graph import Graph, Node, Value
from outrider.providers.wire.pack import pack_graph, pack_model
from outrider.scheduler import verdicts
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.dumps import stacks
from outrider.scheduler.errors import WorkerDiedError
from outrider.scheduler.lifecycle import exit_text, signal_name
from outrider.scheduler.model import LoadedModel, load_model
from outrider.scheduler.monitor import Monitor
from outrider.scheduler.onnx_form import onnx_form
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.provider_file import is_foreign, loads
from outrider.scheduler.story import last_words
from outrider.scheduler.verdicts import Verdict
from outrider.scheduler.worker import Worker

VARIABLE = "OUTRIDER_PROBE"


def wanted() -> bool:
    """Whether OUTRIDER_PROBE lets providers be probed. Raises InvalidOptionError for what is neither 0 nor 1."""
    text = os.environ.get(VARIABLE, "").strip() or "1"
    if text not in ("0", "1"):
        raise invalid_option(VARIABLE, text, "0, 1 or nothing")
    return text == "1"


def probed(spec: ProviderSpec) -> bool:
    """Whether a provider is one of somebody else's, and none that is being debugged."""
    return is_foreign(spec) and not spec.debug


def small_graph() -> Graph:
    """y = Relu(x @ w + b), all float32: operators that most providers have heard of."""
    x, w, b, p, s, y = (
        Value(name, "float32", shape)
        for name, shape in {"x": (1, 4), "w": (4, 4), "b": (4,), "p": (1, 4), "s": (1, 4), "y": (1, 4)}.items()
    )
    made = (("MatMul", (x, w), p), ("Add", (p, b), s), ("Relu", (s,), y))
    nodes = tuple(Node(i, f"#{i}", op, "", 21, {}, read, (value,)) for i, (op, read, value) in enumerate(made))
    return Graph("probe", nodes, (x, w, b), (y,), {}, {"": 21})


def hand_over(monitor: Monitor, worker: Worker, loaded: LoadedModel) -> tuple[dict[int, int], dict[str, Any] | None]:
    """Give a worker the constants of a model; what a Claim then says of them, and of the ONNX form if that is wanted.

    One that dies meanwhile does not get them: what becomes of the Claim tells how it died.
    """
    weights: dict[int, int] = {}
    model: dict[str, Any] | None = None
    if worker.hello is not None and worker.hello.wants_model:
        form = onnx_form(loaded)
        model = pack_model(form.data, form.weights, form.moved, form.foreign)
    one = worker.current
    try:
        for segment, descriptor in loaded.store.seal().items():
            (weights[segment],) = one.send_descriptors([descriptor])
    except WorkerDiedError:
        monitor.end_if_deaf(one)
    return weights, model


def _small_claim(monitor: Monitor, worker: Worker, session: int) -> messages.Claim:
    """The question what a worker claims of the small graph, with its ONNX form where that is wanted."""
    graph = small_graph()
    if worker.hello is None or not worker.hello.wants_model:
        return messages.Claim(session, 1, pack_graph(graph), {}, None)
    kinds = [helper.make_tensor_value_info(one.name, TensorProto.FLOAT, one.shape) for one in graph.inputs]
    result = [helper.make_tensor_value_info(one.name, TensorProto.FLOAT, one.shape) for one in graph.outputs]
    nodes = [helper.make_node(n.op_type, [v.name for v in n.inputs], [v.name for v in n.outputs]) for n in graph.nodes]
    imports = [helper.make_opsetid("", graph.opsets[""])]
    proto = helper.make_model(helper.make_graph(nodes, graph.name, kinds, result), opset_imports=imports, ir_version=10)
    loaded = load_model(proto)
    try:
        return messages.Claim(session, 1, pack_graph(loaded.graph), *hand_over(monitor, worker, loaded))
    finally:
        loaded.store.close()


def start_verdict(worker: Worker, reason: str, deadline: float) -> Verdict:
    """The verdict on a worker that did not start. `reason`: what is said of it; `deadline`: seconds it was given."""
    life = worker.life
    code = life.code if life.cause == "died" else None
    return Verdict(
        cause=life.cause or "raised",
        phase="start",
        reason=reason,
        signal=None if code is None else signal_name(code),
        exit_code=code,
        deadline=deadline,
        story=_story(worker),
        when=time.time(),
    )


def _story(worker: Worker) -> str:
    """What it left, or wrote so far."""
    one = worker.current
    tail = one.output.tail().rstrip()
    if one.facts is None:
        return f"Its last output:\n{tail}" if tail else ""
    left = last_words(one.facts, said=one.life.cause == "raised")
    return "\n".join(text for text in (one.life.detail.rstrip(), left) if text)


def claim_verdict(
    monitor: Monitor,
    worker: Worker,
    answer: concurrent.futures.Future[messages.Claims],
    seconds: float,
    deadline: float,
) -> Verdict:
    """The verdict on a worker that was asked what it claims: wait at most `seconds` for the answer, then end it.

    `deadline`: what it was given in all. Raises the errors of a fleet that is closed meanwhile.
    """
    try:
        answer.result(max(0.0, seconds))
    except TimeoutError:
        reason = f"it did not answer what it claims within {deadline:g} s{loads(worker.spec)}"
        (stack,) = stacks(monitor, [worker.current], keep=True)
        monitor.kill(worker, reason)
        story = f"Its Python stack:\n{stack}\n{_story(worker)}" if stack else _story(worker)
        return Verdict("late", "claim", reason, None, None, deadline, story, time.time())
    except WorkerDiedError as error:
        return _death_verdict(worker, error, deadline)
    return Verdict(deadline=deadline, when=time.time())


def _death_verdict(worker: Worker, error: WorkerDiedError, deadline: float) -> Verdict:
    """The verdict on a worker that died when it was to claim."""
    why = f" ({error.reason})" if error.reason else ""
    reason = f"{exit_text(error.exit_code)} while it was asked what it claims{why}{loads(worker.spec)}"
    return Verdict("died", "claim", reason, error.signal, error.exit_code, deadline, _story(worker), time.time())


class Probes:
    """The probes of one fleet, while it starts. The deadlines are in seconds."""

    def __init__(self, specs: Sequence[ProviderSpec], start_deadline: float, claim_deadline: float) -> None:
        self._start, self._claim = start_deadline, claim_deadline
        deadlines = {"start": self._start, "claim": self._claim}
        asked = [spec for spec in specs if probed(spec)] if wanted() else []
        known = {spec.display: verdicts.find(spec, deadlines) for spec in asked}
        self._refused = {name: verdict for name, verdict in known.items() if verdict is not None and not verdict.good}
        self._open = {name for name, verdict in known.items() if verdict is None}
        self._asked: dict[str, tuple[int, float, concurrent.futures.Future[messages.Claims]]] = {}

    def refusal(self, spec: ProviderSpec) -> ProviderUnavailableError | None:
        """The error for a provider that an earlier probe speaks against; None for all others."""
        verdict = self._refused.get(spec.display)
        return None if verdict is None else refused(spec, verdict, kept=verdicts.path_of(spec))

    def begin(self, monitor: Monitor, worker: Worker, session: int) -> None:
        """Ask a worker that has started, if it is to be probed. `session`: a number that no session has."""
        if worker.name in self._open:
            message = _small_claim(monitor, worker, session)
            future = monitor.request(worker, message, ("Claims", session, 1))
            self._asked[worker.name] = (session, time.monotonic() + self._claim, future)

    def end(self, monitor: Monitor, worker: Worker) -> ProviderUnavailableError | None:
        """Wait for a worker that was asked, and keep the verdict; the error if it is a bad one."""
        if worker.name not in self._asked:
            return None
        session, until, future = self._asked.pop(worker.name)
        verdict = claim_verdict(monitor, worker, future, until - time.monotonic(), self._claim)
        kept = verdicts.keep(worker.spec, verdict)
        if verdict.good:
            monitor.post(worker, messages.Unload(session))
            return None
        return refused(worker.spec, verdict, kept)

    def not_started(self, worker: Worker, error: ProviderUnavailableError) -> ProviderUnavailableError:
        """Keep the verdict on a worker that did not start, if it was to be probed; the error that says so too."""
        if worker.name not in self._open or worker.life.cause == "closed":
            return error
        verdict = start_verdict(worker, str(error.reason), self._start)
        kept = verdicts.keep(worker.spec, verdict)
        return error if kept is None else refused(worker.spec, verdict, kept)


def refused(spec: ProviderSpec, verdict: Verdict, kept: str | None) -> ProviderUnavailableError:
    """The error for a provider that did badly in a probe; `kept`: the file that says so."""
    when = _time(verdict.when)
    lasting = ""
    if kept is not None:
        until = _time(verdict.when + verdicts.kept_seconds(verdict))
        lasting = (
            f" It is not started again before {until}, unless its files or its options change or {kept} is removed."
        )
    plain = not spec.env and set(spec.options) <= {"library", "registration", "custom_ops"}  # others may be secrets
    told = shlex.quote(str(spec)) if plain else f"'{spec.kind}?...'"
    again = f"`outrider doctor --probe {told}` probes it again"
    reason = f"its probe at {when} failed: {verdict.reason}.{lasting} {again}"
    story = f"\n{verdict.story}" if verdict.story else ""
    return ProviderUnavailableError(
        f"provider {spec.display} is not available: {reason}.{story}", provider=spec.display, reason=reason
    )


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
