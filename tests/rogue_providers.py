"""A provider that reaches into the worker around it and says what no worker may say: when it starts, is asked what it
claims, compiles, or runs on an input whose first element is -99."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import numpy

from outrider.providers.contract import Claim, Provider
from outrider.providers.wire import messages, values
from outrider.providers.wire.codec import msgpack
from outrider.providers.wire.failures import error_to_plain
from outrider.shm.board import word


def worker():
    """The Worker that called us."""
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "control"):
        frame = frame.f_back
    return frame.f_locals["self"]


def say(body):
    """Send bytes, or a message, which need not be well-formed."""
    control = worker().control
    if not isinstance(body, bytes):
        fields = {field.name: getattr(body, field.name) for field in dataclasses.fields(body)}
        body = msgpack.packb({**fields, "type": type(body).__name__, "protocol": messages.PROTOCOL})
    control._outbox.append(body)
    control._wake.ring()


def instead(kind, change):
    """Send `change(message)`, or nothing for None, in place of the next message of a kind."""
    me = worker()
    speakers = [(me.control, "send"), *((loaded, "_send") for loaded in me.sessions.values())]
    before = [getattr(one, name) for one, name in speakers]

    def changed(message):
        if isinstance(message, kind):
            message = change(message)
            for (one, name), send in zip(speakers, before, strict=True):
                setattr(one, name, send)
        if message is not None:
            say(message)

    for one, name in speakers:
        setattr(one, name, changed)


class Rogue(Provider):
    """Relu, and the operators of option `operators`. The file in option `order` says what it does next."""

    def setup(self, context):
        self.options = context.options
        self.wants_model = self.order() == "start: deaf"  # then a probe comes with descriptors
        if self.order() in START:
            START[self.order()]()

    def order(self):
        with open(self.options["order"]) as file:
            return file.read()

    def claim(self, graph):
        order = self.order()
        nodes = [node for node in graph.nodes if node.op_type in self.options.get("operators", ["Relu"])]
        if order in CLAIMS:
            instead(messages.Claims, lambda answer: dataclasses.replace(answer, **CLAIMS[order](answer)))
        if order == "claim: ends apart":
            return [Claim([nodes[0], nodes[-1]])]
        return [Claim([node]) for node in nodes]

    def compile(self, unit):
        order = self.order()
        if order in REFUSED:
            instead(messages.Loaded, lambda answer: dataclasses.replace(answer, refused=REFUSED[order]))
        (node,) = unit.nodes
        return lambda inputs: self._run(OPERATORS[node.op_type], inputs)

    def _run(self, operator, inputs):
        if isinstance(inputs[0], numpy.ndarray) and inputs[0].flat[0] == -99:
            RUNS[self.order()]()
        return [operator(inputs[0])]


OPERATORS = {
    "Relu": lambda x: numpy.maximum(x, 0),
    "SequenceConstruct": lambda x: [x],
}
START = {
    "start: another protocol": lambda: say(msgpack.packb({"type": "Hello", "protocol": 99})),
    "start: deaf": lambda: close_descriptors(),
    "start: another incarnation": lambda: say(messages.Hello(os.getpid(), 7, False, False, {}, {})),
}

ONE = {"nodes": [0], "reference": False, "cost": None}
CLAIMS = {
    "claim: unknown node": lambda answer: {"claims": [{**ONE, "nodes": [17]}]},
    "claim: negative node": lambda answer: {"claims": [{**ONE, "nodes": [-1]}]},
    "claim: node in words": lambda answer: {"claims": [{**ONE, "nodes": ["n0"]}]},
    "claim: node in a list": lambda answer: {"claims": [{**ONE, "nodes": [[0]]}]},
    "claim: true as a node": lambda answer: {"claims": [{**ONE, "nodes": [True]}]},
    "claim: half a node": lambda answer: {"claims": [{**ONE, "nodes": [0.0]}]},
    "claim: nothing": lambda answer: {"claims": [{**ONE, "nodes": []}]},
    "claim: no nodes": lambda answer: {"claims": [{"cost": 1.0}]},
    "claim: one node twice": lambda answer: {"claims": [{**ONE, "nodes": [0, 0]}]},
    "claim: overlap": lambda answer: {"claims": [ONE, ONE]},
    "claim: a hundred thousand": lambda answer: {"claims": [ONE] * 100_000},
    "claim: and decline": lambda answer: {"claims": [ONE], "declines": [{"node": 0, "reason": "no"}]},
    "claim: decline of the unknown": lambda answer: {"declines": [{"node": 17, "reason": "no"}]},
    "claim: decline in a list": lambda answer: {"declines": [{"node": [0], "reason": "no"}]},
    "claim: decline for a list": lambda answer: {"declines": [{"node": 0, "reason": [1, 2]}]},
    "claim: cost in words": lambda answer: {"claims": [{**ONE, "cost": "much"}]},
    "claim: reference in words": lambda answer: {"claims": [{**ONE, "reference": "yes"}]},
    "claim: error without a type": lambda answer: {"error": {"message": 3}},
    "claim: error of another": lambda answer: {
        "error": {"type": "ProviderContractError", "message": "it was him", "fields": {"provider": "cpu"}}
    },
    "claim: error of ours": lambda answer: {"error": {"type": "SessionClosedError", "message": "closed"}},
    "claim: another round": lambda answer: {"round": answer.round + 1},
    "claim: another session": lambda answer: {"session": answer.session + 1},
}

REFUSAL = {"partition": 0, "unit": 0, "reason": "no", "traceback": ""}
REFUSED = {
    "load: another partition": [{**REFUSAL, "partition": 1}],
    "load: partition -2": [{**REFUSAL, "partition": -2}],
    "load: unit 9": [{**REFUSAL, "unit": 9}],
    "load: partition in words": [{**REFUSAL, "partition": "0"}],
    "load: nothing said": [{}],
    "refused: nodes in lists": [{**REFUSAL, "nodes": [["n0"], {}, 7]}],
}


def session():
    (loaded,) = worker().sessions.values()
    return loaded


def before_publishing(change):
    """Have `change(board, edge, slot, run, number)` called once, before the first value is published."""
    loaded = session()
    board, done = loaded._board, {lane.partition.done for lane in loaded._lanes.values()}
    publish = board.publish

    def changed(edge, slot, run, number):
        if edge not in done:
            number = change(board, edge, slot, run, number) or number
        publish(edge, slot, run, number)

    board.publish = changed


def record(field, value):
    def change(board, edge, slot, run, number):
        at, _ = board.version_at(edge, slot, number)
        board.words[at + field] = value

    return lambda: before_publishing(change)


def value_bytes(change):
    """Have `change(view)` write over the bytes of an encoded value."""

    def spoil(board, edge, slot, run, number):
        at, _ = board.version_at(edge, slot, number)
        offset, nbytes = board.words[at + 4 : at + 6]
        change(board._segment.view[offset : offset + nbytes])

    return lambda: before_publishing(spoil)


def another_value(value):
    def change(view):
        body = b"".join(values.encode(value))
        view[: len(body)] = body

    return value_bytes(change)


def words(done=word, value=word):
    """Publish other words of (run, number) than those that are due."""

    def act():
        loaded = session()
        board, dones = loaded._board, {lane.partition.done for lane in loaded._lanes.values()}

        def changed(edge, slot, run, number):
            board.words[board.index(edge, slot)] = (done if edge in dones else value)(run, number)

        board.publish = changed

    return act


def later(run, number):
    return word(run + 1000, number)


def void_without_a_story():
    instead(messages.Failed, lambda message: None)
    raise ArithmeticError("nobody will know")


def void_and_death():
    """Fail, and die before anybody is told why."""
    loaded = session()
    board, dones = loaded._board, {lane.partition.done for lane in loaded._lanes.values()}
    void = board.void

    def changed(edge, slot, run):
        void(edge, slot, run)
        if edge in dones:
            os.kill(os.getpid(), signal.SIGKILL)

    board.void = changed
    instead(messages.Failed, lambda message: None)
    raise ArithmeticError("nobody will know")


def failed(**fields):
    def act():
        loaded = session()
        ((number, slot), lane) = next(iter(loaded._lanes.items()))
        told = {"session": loaded.session, "generation": loaded.generation, "run": lane.last, "slot": slot}
        told |= {"partition": number, "error": error_to_plain(ValueError("no"))}
        say(messages.Failed(**{**told, **fields}))

    return act


def fails_as(kind, **fields):
    """Fail, and tell it as an error of this type."""

    def act():
        told = {"type": kind, "message": "it was not me", "fields": fields, "traceback": ""}
        instead(messages.Failed, lambda message: dataclasses.replace(message, error=told))
        raise ArithmeticError("no")

    return act


def close_descriptors():
    worker().channel.close()


def close_control():
    control = worker().control
    control._stopping = True
    control._wake.ring()


def counts(data):
    """Tell these counters when asked next."""
    return lambda: instead(messages.Stats, lambda answer: dataclasses.replace(answer, data=data))


COUNTERS = {
    "counters: none": counts({}),
    "counters: a list of sessions": counts({"provider": {}, "sessions": [1]}),
    "counters: in words": counts({"provider": {}, "sessions": {"1": {"bound": "many"}}}),
    "counters: a partition in words": counts({"provider": {}, "sessions": {"1": {"partitions": [["0", 1, 1.0]]}}}),
    "counters: a short partition": counts({"provider": {}, "sessions": {"1": {"partitions": [[0]]}}}),
    "counters: an operator in a list": counts({"provider": {}, "sessions": {"1": {"operators": [["a", 1]]}}}),
    "counters: no session": counts({"provider": [], "sessions": {"1": None}}),
}

RUNS = {
    **COUNTERS,
    "": lambda: None,
    "garbage": lambda: say(b"\xc1"),
    "a list as a key": lambda: say(b"\x81\x91\x01\x01"),
    "keys of two kinds": lambda: say(msgpack.packb({1: 2, "a": 3, "type": "Unloaded", "protocol": 1})),
    "an unknown message": lambda: say(msgpack.packb({"type": "Bribe", "protocol": messages.PROTOCOL})),
    "a surplus field": lambda: say(
        msgpack.packb({"type": "Unloaded", "session": 1, "more": 1, "protocol": messages.PROTOCOL})
    ),
    "our own message": lambda: say(messages.Stop()),
    "hello again": lambda: say(messages.Hello(os.getpid(), 1, True, False, {}, {})),
    "start failed": lambda: say(messages.StartFailed(1, "too late", "")),
    "an answer to nothing": lambda: say(messages.Stats(12345, {})),
    "claims again": lambda: say(messages.Claims(1, 1, [], [], None)),
    "unloaded": lambda: say(messages.Unloaded(1)),
    "unloaded ten thousand times": lambda: [say(messages.Unloaded(1)) for _ in range(10_000)],
    "too large": lambda: say(messages.pack(messages.Failed(1, 1, 1, 0, 0, {"message": "x" * (2 << 20)}))),
    "failed: of another": failed(partition=1),
    "failed: partition -1": failed(partition=-1),
    "failed: of a run to come": failed(run=1 << 40),
    "failed: of a slot that is none": failed(slot=99),
    "failed: of another session": failed(session=1 << 20),
    "error: another is blamed": fails_as("KernelError", provider="cpu"),
    "error: the session was closed": fails_as("SessionClosedError"),
    "error: a death": fails_as("WorkerDiedError", signal="SIGSEGV", provider="cpu"),
    "error: a claim on other nodes": fails_as("ClaimBrokenError", nodes=["n9", ["n0"]], reason="no"),
    "error: an edge of nobody": fails_as("BrokenEdgeError", value="v", board=77, edge=0, reason="so"),
    "error: an edge in words": fails_as("BrokenEdgeError", value=3, board="b", edge=[], reason=None),
    "error: an edge that is right": fails_as("BrokenEdgeError", value="y", board=1, edge=0, reason="so"),
    "void without a story": void_without_a_story,
    "void and death": void_and_death,
    "record: version": record(0, 0),
    "record: kind": record(1, 9),
    "record: encoded": record(1, 2),
    "record: nothing": record(1, 3),
    "record: dtype": record(2, 11),
    "record: unknown dtype": record(2, 999),
    "record: pointers": record(2, 8),
    "record: itemsize": record(3, 1),
    "record: offset": record(4, 1 << 60),
    "record: offset of the board": record(4, 0),
    "record: misaligned": record(4, 1),
    "record: nbytes": record(5, 4),
    "record: memory": record(6, 5 << 32),
    "record: block": record(6, 1),
    "record: place in the pool": lambda: record(6, session()._pool.memory << 32)(),
    "record: rank": record(7, 1),
    "record: huge rank": record(7, 1 << 50),
    "record: dimension": record(8, 1 << 61),
    "number 0": words(value=lambda run, number: word(run, 0)),
    "number 17": words(value=lambda run, number: word(run, 17)),
    "number 65535": words(value=lambda run, number: word(run, 65535)),
    "value of the last run": words(value=lambda run, number: word(run - 1, number)),
    "value of a run to come": words(value=later),
    "done with a run to come": words(done=later),
    "all of a run to come": words(later, later),
    "encoded: length of the header": value_bytes(lambda view: view.__setitem__(7, 255)),
    "encoded: no header": value_bytes(lambda view: view.__setitem__(8, 0xC1)),
    "encoded: a map": another_value({1: numpy.float32(2)}),
    "encoded: another dtype": another_value([numpy.zeros(2)]),
    "encoded: a tensor": another_value(numpy.zeros(2, numpy.float32)),
    "encoded: nothing": another_value(None),
    "closed descriptors": close_descriptors,
    "closed control": close_control,
}
