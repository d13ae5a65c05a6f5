"""Who gets which node: the conversation with the providers, in rounds, and the plan that comes of it.

Round 1 shows every provider the whole graph, calls of model-local functions as nodes. What nobody claimed is then shown
again, with unclaimed calls inlined (round 2). A unit that a provider claimed and then cannot compile is taken from that
provider and planned again (`Placer.refuse`). `Answers` keeps what was said and is pure; `Placer` asks.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fnmatch
import functools
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.providers.wire import messages
from outrider.providers.wire.failures import error_from_plain, first_names
from outrider.providers.wire.graph import Graph, Node, Value
from outrider.providers.wire.pack import pack_graph, pack_model
from outrider.providers.wire.spans import Recorder
from outrider.scheduler import pins as pinning
from outrider.scheduler import planning, story
from outrider.scheduler.checked import invalid_option, unsupported_option
from outrider.scheduler.claims import checked
from outrider.scheduler.collector import collector_paused
from outrider.scheduler.costs import Costs, estimate, measured
from outrider.scheduler.crossings import measured_crossing
from outrider.scheduler.deploy import Deployer
from outrider.scheduler.dumps import end_late
from outrider.scheduler.errors import (
    ClaimBrokenError,
    PinDeclinedError,
    ProviderUnavailableError,
    UnsupportedOpError,
    WorkerDiedError,
)
from outrider.scheduler.failures import KINDS, under_name
from outrider.scheduler.functions import inline_calls
from outrider.scheduler.generation import RefusedUnit
from outrider.scheduler.model import LoadedModel
from outrider.scheduler.numbering import Blueprint
from outrider.scheduler.onnx_form import onnx_form
from outrider.scheduler.options import ProviderSpec, SessionOptions
from outrider.scheduler.report import Refusal, group_declines
from outrider.scheduler.requiring import not_all
from outrider.scheduler.strategy import Decision, Question, decide, teams
from outrider.scheduler.trace import spanned
from outrider.scheduler.worker import Incarnation, Worker

NOT_CLAIMED = "not claimed"


@dataclass
class Answers:
    """What the providers said, by node name, so that it survives the inlining of functions."""

    claims: list[tuple[int, tuple[str, ...], float | None]] = field(default_factory=list)  # (provider, nodes, cost)
    declines: dict[tuple[int, str], str] = field(default_factory=dict)
    refused: set[tuple[int, str]] = field(default_factory=set)
    withheld: dict[tuple[int, str], str] = field(default_factory=dict)  # nodes in quarantine, and why
    away: dict[int, str] = field(default_factory=dict)  # providers that cannot be used now, and why
    _claimed: dict[tuple[int, str], bool] = field(default_factory=dict)  # (provider, node) -> by a stop-gap

    def add(self, provider: int, name: str, graph: Graph, answer: messages.Claims) -> None:
        """Note one provider's answer about `graph`. Raises ClaimError for what it may not say."""
        offered, declined = checked(name, graph, answer)
        again = {node.name for node in graph.nodes}
        # What is shown again lies in no claim that stands: an earlier claim on it has lapsed.
        self.claims = [one for one in self.claims if one[0] != provider or again.isdisjoint(one[1])]
        for nodes, reference, cost in offered:
            self.claims.append((provider, nodes, cost))
            self._claimed.update(dict.fromkeys(((provider, one) for one in nodes), reference))
        self.declines.update(((provider, one), reason) for one, reason in declined.items())

    def forgive(self, provider: int) -> None:
        """Somebody asked for a restart: what the provider could not compile may be tried again."""
        for key in [key for key in self.refused if key[0] == provider]:
            self.refused.discard(key)
            self.declines.pop(key, None)

    def refuse(self, provider: int, nodes: Sequence[str], reason: str) -> None:
        """The provider could not compile these: its claims on them no longer count."""
        for name in nodes:
            self.refused.add((provider, name))
            self.declines[provider, name] = reason

    def offers(self, position: Mapping[str, int]) -> list[planning.Offer]:
        """The claims that stand, for a graph with these node positions."""
        return [
            planning.Offer(provider, tuple(position[name] for name in nodes), cost)
            for provider, nodes, cost in self.claims
            if all(name in position for name in nodes) and all(self._stands(provider, name) for name in nodes)
        ]

    def _stands(self, provider: int, name: str) -> bool:
        key = provider, name
        return provider not in self.away and key not in self.refused and key not in self.withheld

    def claimed(self, provider: int, name: str) -> bool:
        """True if this provider's claim on the node stands."""
        return (provider, name) in self._claimed and self._stands(provider, name)

    def reference(self, provider: int, name: str) -> bool:
        """True if this provider serves the node by a stop-gap."""
        return self._claimed.get((provider, name), False)

    def reason(self, provider: int, name: str) -> str:
        """Why a provider does not take a node."""
        key = provider, name
        return self.away.get(provider) or self.withheld.get(key) or self.declines.get(key, NOT_CLAIMED)


def _how_lost(error: WorkerDiedError | ProviderUnavailableError) -> str:
    if isinstance(error, WorkerDiedError):
        return "it died when it was asked what it claims"
    return str(error.reason)


def plan_nodes(graph: Graph) -> list[planning.PlanNode]:
    """The planner's view of a graph: constants are not among the inputs."""
    return [
        planning.PlanNode(
            node.name,
            tuple(
                value.name
                for value in (*node.inputs, *node.captures)
                if value.name and value.name not in graph.constants
            ),
            tuple(value.name for value in node.outputs if value.name),
            constant=bool(node.outputs) and all(value.constant for value in node.outputs if value.name),
        )
        for node in graph.nodes
    ]


def left_over(graph: Graph, positions: Sequence[int]) -> Graph:
    """The part of a graph made of these nodes, as a graph: what it reads are inputs, what others read are outputs."""
    chosen = [graph.nodes[position] for position in positions]
    made = {value.name for node in chosen for value in node.outputs}
    inputs: dict[str, Value] = {}
    for node in chosen:
        for value in (*node.inputs, *node.captures):
            if value.name and value.name not in made and value.name not in graph.constants:
                inputs[value.name] = value
    inside = set(positions)
    read = {value.name for value in graph.outputs}
    for position, node in enumerate(graph.nodes):
        if position not in inside:
            read.update(value.name for value in (*node.inputs, *node.captures))
    outputs = [value for node in chosen for value in node.outputs if value.name in read]
    return dataclasses.replace(graph, nodes=tuple(chosen), inputs=tuple(inputs.values()), outputs=tuple(outputs))


def check_pins(loaded: LoadedModel, options: SessionOptions, specs: Sequence[ProviderSpec]) -> None:
    """What can be said of pins before any process starts; keys only where no call can be inlined, which adds names.

    Raises UnknownProviderError, PinNotFoundError, UnsupportedOptionError for a node of a body, and InvalidOptionError
    for a pin to one of several workers that each have a replica.
    """
    pins, providers = options.pins, [spec.display for spec in specs]
    pinning.check_providers(pins, providers)
    if options.strategy == "replicate":
        for team in teams(specs):
            names = [specs[position].display for position in team]
            for key, provider in pins.items():
                if len(team) > 1 and provider in names:
                    expected = f"a provider that all replicas have: each of {', '.join(names)} has a replica of its own"
                    raise invalid_option(f"pins[{key!r}]", provider, expected)
    holders = {name: node.name for node in loaded.graph.nodes for name in _body_names(node)}
    for key, provider in pins.items():
        held = [key] if key in holders else [name for name in holders if fnmatch.fnmatchcase(name, key)]
        if held and (key in holders or not any(fnmatch.fnmatchcase(node.name, key) for node in loaded.graph.nodes)):
            reason = f"a body runs where the node that holds it runs; pin {holders[held[0]]!r}."
            raise unsupported_option(f"SessionOptions.pins[{key!r}]", provider, reason)
    if not loaded.functions:
        pinning.resolve(pins, _pin_names(loaded), providers)


def _pin_names(loaded: LoadedModel) -> list[tuple[str, bool]]:
    """(full name, made of constants only) of all that may be pinned; the nodes of the graph come first, in order."""
    names = [(one.name, plan.constant) for one, plan in zip(loaded.graph.nodes, plan_nodes(loaded.graph), strict=True)]
    return names + [(name, True) for name, _ in loaded.constant_nodes]


def _body_names(node: Node) -> Iterator[str]:
    for _, body in node.bodies():
        for one in body.nodes:
            yield one.name
            yield from _body_names(one)


class Placer:
    """Places one model on workers. `workers` are in priority order; positions in it are the planner's providers."""

    def __init__(
        self, loaded: LoadedModel, workers: Sequence[Worker], deployer: Deployer, options: SessionOptions
    ) -> None:
        self.loaded = loaded
        self.workers = list(workers)
        self.deployer = deployer
        self.options = options
        self.answers = Answers()
        self.notes: list[str] = []
        # Providers that did not say what they claim.
        self._lost: dict[int, WorkerDiedError | ProviderUnavailableError] = {}
        self.plan: planning.Plan
        self.nodes: list[planning.PlanNode]
        self.decision: Decision
        self.measured: list[tuple[list[int], float]] = []  # nodes, and the seconds that they took together
        self.measured_by: dict[int, int] = {}  # node -> the provider that took them
        self.sizes: Mapping[str, int] = {}  # of symbolic dimensions, as far as they are known
        self._offers: list[planning.Offer]
        self._rounds = 0
        self._last: tuple[tuple[Any, ...], planning.Plan] | None = None

    @property
    def recorder(self) -> Recorder | None:
        """Where spans go while the session is traced."""
        return self.deployer.recorder

    @property
    def graph(self) -> Graph:
        """The model as it is placed: function calls that nobody claimed are inlined."""
        return self.loaded.graph

    @collector_paused()
    def place(self) -> Blueprint:
        """Ask, plan, and return what to deploy.

        Raises UnsupportedOpError, HeterogeneousPlacementRequiredError, PinDeclinedError, PinNotFoundError,
        UnknownProviderError, ClaimError, and the errors of workers.
        """
        self._serialize()
        self._ask(self.graph)
        shown = self.graph
        trial = self._planned({})
        if trial.unclaimed and self.loaded.functions:
            self.loaded = inline_calls(self.loaded, [self.graph.nodes[i].name for i in trial.unclaimed])
            self._serialize()
            self.deployer.weights = self.loaded.store.seal()
        left = self._planned({}).unclaimed
        # Some providers claim all that they are shown or nothing; the same graph again would get the same answers.
        if left and (self.graph is not shown or len(left) < len(shown.nodes)):
            self._ask(left_over(self.graph, left))
        return self.replan()

    def _serialize(self) -> None:
        """Have the ONNX form of the model at hand, if a provider wants it."""
        if any(worker.hello is not None and worker.hello.wants_model for worker in self.workers):
            form = onnx_form(self.loaded)
            self.deployer.model = pack_model(form.data, form.weights, form.moved, form.foreign)
            self.deployer.weights = self.loaded.store.seal()

    @functools.cached_property
    def model(self) -> str:
        """What tells this model from others on a fleet."""
        nodes = "\n".join(f"{node.name} {node.label}" for node in self.graph.nodes)
        return f"{self.graph.name} {hashlib.sha256(nodes.encode()).hexdigest()[:16]}"

    def replan(self, away: Mapping[Worker, str] | None = None) -> Blueprint:
        """Plan with the answers so far, without what is in quarantine, and without workers that are `away`, and why."""
        names = [worker.name for worker in self.workers]
        away = away or {}
        self.answers.away = {i: one for i, w in enumerate(self.workers) if (one := away.get(w))}
        self.answers.away.update({i: _how_lost(error) for i, error in self._lost.items()})
        quarantine = self.deployer.fleet.quarantine
        self.answers.withheld = {
            (provider, node): "it died twice in a row when it ran this"
            for provider, name in enumerate(names)
            if quarantine.of(name)
            for nodes in quarantine.holds(self.model, name)
            for node in nodes
        }
        assignment = self._pins(names)
        self.plan = self._planned(assignment)
        if self.plan.pin_declined:
            node, provider = self.plan.pin_declined[0]
            name = self.graph.nodes[node].name
            reason = self.answers.reason(provider, name)
            raise PinDeclinedError(
                f"node {name!r} ({self.graph.nodes[node].label}) is pinned to {names[provider]}, "
                f"which does not take it: {reason}",
                pin=pinning.key_of(self.options.pins, name, self.graph.nodes[node].origin),
                node=name,
                provider=names[provider],
                reason=reason,
            )
        for provider, worker in enumerate(self.workers):
            if worker.spec.required == "all":
                self._check_all(provider)
        if self.plan.unclaimed:
            for lost in self._lost.values():  # that may be why
                raise lost from self._unsupported()
            raise self._unsupported()
        self.decision = self._decide(assignment)
        self.plan = self.decision.plan
        inputs = [value.name for value in self.graph.inputs]
        outputs = [value.name for value in self.graph.outputs]
        return Blueprint(
            graph=self.graph,
            plan=self.plan,
            edges=planning.edges(self.plan, self.nodes, inputs, outputs),
            interfaces=planning.interfaces(self.plan, self.nodes, inputs, outputs),
            workers=self.workers,
            optimization=self.options.optimization,
            slots=len(self.deployer.slot_bells),
            output_memory=self.options.output_memory,
            spin_us=self.options.spin_us,
        )

    def replaceable(self, worker: Worker) -> bool:
        """Whether what this worker claims may go to another one, when it dies or cannot compile it."""
        return self.options.fallback and worker.spec.required != "all"

    def _check_all(self, provider: int) -> None:
        """Raises HeterogeneousPlacementRequiredError unless the plan gives every node to this provider."""
        name = self.workers[provider].name
        elsewhere = [i for i, owner in enumerate(self.plan.owner) if owner is not None and owner != provider]
        missing = []
        for i in sorted({*elsewhere, *self.plan.unclaimed}):
            node, owner = self.graph.nodes[i], self.plan.owner[i]
            reason = self.answers.reason(provider, node.name)
            if self.answers.claimed(provider, node.name):
                reason = "it claims it, but the claim cannot be kept"
                if owner is not None:
                    reason += f"; {self.workers[owner].name} has it, by its place in the list or a pin"
            missing.append(Refusal(node.name, node.op_type, node.domain, name, reason))
        if missing:
            raise not_all(name, missing, sum(owner is not None for owner in self.plan.owner) + len(self.plan.unclaimed))

    def learn(self, took: Sequence[tuple[list[int], float]], sizes: Mapping[str, int]) -> Blueprint:
        """Plan with what was measured: nodes (positions), and the seconds that they took together in one run.

        `sizes`: of symbolic dimensions in those runs.
        """
        self.measured, self.sizes = list(took), sizes
        owners = {node: self.plan.owner[node] for nodes, _ in took for node in nodes}
        self.measured_by = {node: owner for node, owner in owners.items() if owner is not None}
        return self.replan()

    def refuse(self, blueprint: Blueprint, refused: Sequence[RefusedUnit]) -> None:
        """Take what did not compile from its providers. Raises ClaimBrokenError when that is not wanted."""
        for one in refused:
            placed = blueprint.plan.partitions[one.partition]
            unit = blueprint.plan.units[placed.units[one.unit]].nodes
            nodes = list(one.nodes) or [self.graph.nodes[i].name for i in unit]
            reason, traceback = one.reason, one.traceback
            worker = self.workers[placed.provider].name
            if not self.replaceable(self.workers[placed.provider]):
                raise ClaimBrokenError(
                    f"provider {worker} claimed {first_names(nodes)} and cannot compile it: {reason}",
                    provider=worker,
                    nodes=nodes,
                    reason=reason,
                    remote_traceback=traceback,
                )
            self.take_back(placed.provider, nodes, reason)

    def take_back(self, provider: int, nodes: Sequence[str], reason: str) -> None:
        """A provider cannot compile what it claimed: it gets these nodes no more, until a restart is asked for."""
        worker = self.workers[provider].name
        self.notes.append(f"{worker} claimed {first_names(nodes)} and could not compile it: {reason}")
        self.answers.refuse(provider, nodes, reason)

    def forgive(self, worker: Worker) -> None:
        """Somebody asked for a restart of this worker's provider."""
        if worker in self.workers:
            provider = self.workers.index(worker)
            self.answers.forgive(provider)
            if self._lost.pop(provider, None) is not None:
                self._ask(self.graph, [provider])

    # Asking --------------------------------------------------------------------------------------------------------
    @spanned("claim")
    def _ask(self, graph: Graph, providers: Collection[int] | None = None) -> None:
        """Show a graph to every provider, or to these. One that dies over it is asked once more, with `replay`."""
        self._rounds += 1
        packed = pack_graph(graph)
        waiting = []
        for position, worker in enumerate(self.workers):
            if position in self._lost or position not in (range(len(self.workers)) if providers is None else providers):
                continue
            try:
                one = self.deployer.fleet.revive(worker)
            except ProviderUnavailableError as error:
                self._lose(position, error)
            else:
                waiting.append((position, one, self._request(one, packed)))
        for position, one, future in waiting:
            try:
                answer = self._answer(one, future)
            except WorkerDiedError as death:
                again = self._ask_again(position, death, packed)
                if again is None:
                    continue
                answer = again
            except ProviderUnavailableError as error:
                self._lose(position, error)
                continue
            if answer.error is not None:
                raise self._claim_failed(one.worker, answer.error)
            self.answers.add(position, one.worker.name, graph, answer)

    def _request(self, one: Incarnation, packed: dict[str, Any]) -> concurrent.futures.Future[messages.Claims]:
        try:
            weights = self.deployer.weights_for(one)
        except WorkerDiedError as error:
            failed: concurrent.futures.Future[messages.Claims] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed
        model = self.deployer.model_for(one)
        message = messages.Claim(self.deployer.session, self._rounds, packed, weights, model)
        return self.deployer.fleet.monitor.request(one, message, ("Claims", self.deployer.session, self._rounds))

    def _answer(self, one: Incarnation, future: concurrent.futures.Future[messages.Claims]) -> messages.Claims:
        """Wait for the claims. Raises the death of the worker; ProviderUnavailableError for one that is late."""
        try:
            return future.result(one.worker.patience(self.options.claim_deadline))
        except TimeoutError as error:
            reason = f"it did not answer what it claims within {self.options.claim_deadline:g} s"
            raise end_late(self.deployer.fleet.monitor, one, reason, self.deployer.session) from error

    def _ask_again(self, position: int, death: WorkerDiedError, packed: dict[str, Any]) -> messages.Claims | None:
        """The claims of a worker that died when it was asked for them; None if the session goes on without it."""
        worker = self.workers[position]
        if self.options.replay:
            try:
                one = self.deployer.fleet.revive(worker)
                return self._answer(one, self._request(one, packed))
            except WorkerDiedError as second:
                facts = worker.current.facts
                if facts is not None and facts.incarnation == second.incarnation:
                    second = story.died(dataclasses.replace(facts, attempts=[story.attempt(death)]))
                self._lose(position, second)
            except ProviderUnavailableError as error:
                self._lose(position, error)
        else:
            self._lose(position, death)
        return None

    def _lose(self, position: int, error: WorkerDiedError | ProviderUnavailableError) -> None:
        """Go on without what a provider would have claimed, with `fallback` and another provider; else raise."""
        worker = self.workers[position]
        if not self.replaceable(worker) or len(self._lost) + 1 >= len(self.workers) or self.deployer.fleet.closed:
            raise error
        self._lost[position] = error
        told = f"{worker.name}: {_how_lost(error)}"
        self.notes.append(f"{told} ({error.message.splitlines()[0]})")
        log = self.deployer.fleet.monitor.log_queue.logger("outrider.session")
        log.warning("%s; the session goes on without it", told)

    def _claim_failed(self, worker: Worker, plain: dict[str, Any]) -> Exception:
        known = error_from_plain(plain, KINDS)
        if known is not None:
            return under_name(known, worker.name)
        reason = f"claim() raised {plain.get('type')}: {plain.get('message')}"
        return ClaimBrokenError(
            f"provider {worker.name}: {reason}",
            provider=worker.name,
            nodes=[],
            reason=reason,
            remote_traceback=plain.get("traceback"),
        )

    # Planning ------------------------------------------------------------------------------------------------------
    @spanned("plan")
    def _planned(self, assignment: Mapping[int, int]) -> planning.Plan:
        """The plan of the answers so far; the last one again when nothing that it depends on has changed."""
        answers = self.answers
        without = set(answers.refused), dict(answers.withheld), dict(answers.away)
        depends = (self.graph, len(answers.claims), without, dict(assignment))
        if self._last is not None and self._last[0][0] is depends[0] and self._last[0][1:] == depends[1:]:
            return self._last[1]
        self.nodes = plan_nodes(self.graph)
        position = {node.name: i for i, node in enumerate(self.graph.nodes)}
        self._offers = self.answers.offers(position)
        planned = self._make(assignment, ())
        self._last = (depends, planned)
        return planned

    def _make(self, assignment: Mapping[int, int], preferred: Collection[int]) -> planning.Plan:
        traits = [planning.ProviderTraits(w.name, w.hello is not None and w.hello.merge) for w in self.workers]
        made = {name for node in self.nodes for name in node.outputs}
        outputs = [value.name for value in self.graph.outputs if value.name in made]
        return planning.plan(self.nodes, self._offers, traits, outputs, assignment, preferred)

    def _decide(self, assignment: Mapping[int, int]) -> Decision:
        """The plan of the session's strategy, from one by priority that can run; that itself where it is required."""
        if any(worker.spec.required == "all" for worker in self.workers):
            return Decision(self.plan)

        def make(preferred: Collection[int]) -> planning.Plan:
            return self._make(assignment, preferred) if preferred else self._planned(assignment)

        question = Question(self.graph, self.nodes, self._offers, self.workers, assignment, make)
        return decide(self.options.strategy, question, self.costs)

    def costs(self) -> Costs:
        """What nodes and crossings cost, with what was measured of this model put in."""
        return measured(estimate(self.graph, measured_crossing(), self.sizes), self.measured)

    def _pins(self, providers: Sequence[str]) -> dict[int, int]:
        wanted = dict(self.options.pins)
        for node in self.graph.nodes:  # a pin of a call that was inlined is a pin of its nodes
            for call in node.origin:
                if call in self.options.pins:
                    wanted.setdefault(node.name, self.options.pins[call])
                    wanted.pop(call, None)
        resolved = pinning.resolve(wanted, _pin_names(self.loaded), providers)
        self.notes += [
            f"the pin {key!r} has no effect: {name} is made of constants only" for key, name in resolved.constant
        ]
        return {position: provider for position, provider in resolved.assignment.items() if position < len(self.nodes)}

    def _unsupported(self) -> UnsupportedOpError:
        nodes = [self.graph.nodes[i] for i in self.plan.unclaimed]
        groups = group_declines(
            Refusal(node.name, node.op_type, node.domain, worker.name, self.answers.reason(provider, node.name))
            for node in nodes
            for provider, worker in enumerate(self.workers)
        )
        lines = [f"  {group}" for group in groups]
        first = nodes[0]
        asked = [worker.name for worker in self.workers]
        return UnsupportedOpError(
            f"no provider takes {len(nodes)} of {len(self.graph.nodes)} nodes:\n" + "\n".join(lines) + "\n"
            "Add a provider that does, or replace these operators in the model.",
            op_type=first.op_type,
            domain=first.domain or "ai.onnx",
            node=first.name,
            opset=first.opset,
            reason=self.answers.reason(0, first.name),
            execution_providers=asked,
            groups=[group.to_dict() for group in groups],
            nodes=[node.name for node in nodes],
        )
