"""Providers that reach into the worker around them and say what no worker may say. They compute Relu, and `how` tells
what they do when the first element of the input is -99, or when they are asked what they claim."""

from __future__ import annotations

import dataclasses
import os
import sys

import msgpack
import numpy

from outrider.providers.contract import Claim, Decline, Provider
from outrider.providers.wire import messages
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
    """Send `change(message)`, or nothing for None, in place of each message of a kind."""
    me = worker()

    def changed(message):
        message = change(message) if isinstance(message, kind) else message
        if message is not None:
            say(message)

    me.control.send = changed
    for loaded in me.sessions.values():
        loaded._send = changed


class Rogue(Provider):
    def setup(self, context):
        self.options = context.options
        self.how = context.options.get("how", "")
        if self.how.startswith("start: "):
            START[self.how](context.options)

    def claim(self, graph):
        claims = [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]
        if self.how.startswith("claim: "):
            instead(messages.Claims, lambda answer: dataclasses.replace(answer, **CLAIMS[self.how](answer)))
        if self.how == "not convex":
            first, middle, last = graph.nodes
            claims = [Claim([first, last]), Decline(middle, "not mine")]
        return claims

    def compile(self, unit):
        if self.how.startswith("load: "):
            instead(messages.Loaded, lambda answer: dataclasses.replace(answer, refused=REFUSED[self.how]))
        return self._run

    def _run(self, inputs):
        if inputs[0].flat[0] == -99:
            for name in self.how.split(" and "):
                RUNS[name](self.options)
        return [numpy.maximum(inputs[0], 0)]


START = {
    "start: another protocol": lambda _: say(msgpack.packb({"type": "Hello", "protocol": 99})),
    "start: another incarnation": lambda _: say(messages.Hello(os.getpid(), 7, False, False, None, {})),
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
    "claim: a million": lambda answer: {"claims": [ONE] * 1_000_000},
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

    return lambda options: before_publishing(change)


def bytes_of_value(offset, value):
    """Write a byte into the encoded value."""

    def change(board, edge, slot, run, number):
        at, _ = board.version_at(edge, slot, number)
        board._segment.view[board.words[at + 4] + offset] = value

    return lambda options: before_publishing(change)


def done_word(of):
    """Publish, in place of the done word, another."""

    def act(options):
        loaded = session()
        board, done = loaded._board, {lane.partition.done for lane in loaded._lanes.values()}
        publish = board.publish

        def changed(edge, slot, run, number):
            publish(edge, slot, of(run) if edge in done else run, number)

        board.publish = changed

    return act


def value_word(of):
    """Publish, in place of the word of a value, another one."""

    def change(board, edge, slot, run, number):
        board.words[board.index(edge, slot)] = of(run, number)

    def act(options):
        loaded = session()
        board, done = loaded._board, {lane.partition.done for lane in loaded._lanes.values()}
        publish = board.publish

        def changed(edge, slot, run, number):
            if edge in done:
                publish(edge, slot, run, number)
            else:
                change(board, edge, slot, run, number)

        board.publish = changed

    return act


def void_without_a_story(options):
    instead(messages.Failed, lambda message: None)
    raise ArithmeticError("nobody will know")


def failed(**fields):
    def act(options):
        loaded = session()
        ((number, slot), lane) = next(iter(loaded._lanes.items()))
        told = {"session": loaded.session, "generation": loaded.generation, "run": lane.last, "slot": slot}
        told |= {"partition": number, "error": error_to_plain(ValueError("no"))}
        say(messages.Failed(**{**told, **fields}))

    return act


def fails_as(kind, **fields):
    """Fail, and tell it as an error of this type."""

    def act(options):
        told = {"type": kind, "message": "it was not me", "fields": fields, "traceback": ""}
        instead(messages.Failed, lambda message: dataclasses.replace(message, error=told))
        raise ArithmeticError("no")

    return act


def close_descriptors(options):
    worker().channel.close()


def close_control(options):
    control = worker().control
    control._stopping = True
    control._wake.ring()


RUNS = {
    "": lambda options: None,
    "garbage": lambda options: say(b"\xc1"),
    "a list as a key": lambda options: say(b"\x81\x91\x01\x01"),
    "keys of two kinds": lambda options: say(msgpack.packb({1: 2, "a": 3, "type": "Unloaded", "protocol": 1})),
    "an unknown message": lambda options: say(msgpack.packb({"type": "Bribe", "protocol": messages.PROTOCOL})),
    "a surplus field": lambda options: say(
        msgpack.packb({"type": "Unloaded", "session": 1, "more": 1, "protocol": messages.PROTOCOL})
    ),
    "our own message": lambda options: say(messages.Stop()),
    "hello again": lambda options: say(messages.Hello(os.getpid(), 1, True, False, None, {})),
    "start failed": lambda options: say(messages.StartFailed(1, "too late", "")),
    "an answer to nothing": lambda options: say(messages.Stats(12345, {})),
    "claims again": lambda options: say(messages.Claims(1, 1, [], [], None)),
    "unloaded": lambda options: say(messages.Unloaded(1)),
    "failed: of another": failed(partition=1),
    "failed: partition -1": failed(partition=-1),
    "failed: of a run to come": failed(run=1 << 40),
    "failed: of a slot that is none": failed(slot=99),
    "failed: of another session": failed(session=1 << 20),
    "error: another is blamed": fails_as("KernelError", provider="cpu"),
    "error: the session was closed": fails_as("SessionClosedError"),
    "error: a death": fails_as("WorkerDiedError", signal="SIGSEGV", provider="cpu"),
    "error: an edge of nobody": fails_as("BrokenEdgeError", value="v", board=77, edge=0, reason="so"),
    "error: an edge in words": fails_as("BrokenEdgeError", value=3, board="b", edge=[], reason=None),
    "error: an edge that is right": fails_as("BrokenEdgeError", value="y", board=1, edge=0, reason="so"),
    "void without a story": void_without_a_story,
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
    "record: place in the pool": lambda options: record(6, session()._pool.memory << 32)(options),
    "record: rank": record(7, 1),
    "record: huge rank": record(7, 1 << 50),
    "record: dimension": record(8, 1 << 61),
    "number 0": value_word(lambda run, number: word(run, 0)),
    "number 17": value_word(lambda run, number: word(run, 17)),
    "number 65535": value_word(lambda run, number: word(run, 65535)),
    "value of the last run": value_word(lambda run, number: word(run - 1, number)),
    "value of a run to come": value_word(lambda run, number: word(run + 1000, number)),
    "done with a run to come": done_word(lambda run: run + 1000),
    "encoded: header": bytes_of_value(7, 255),
    "encoded: kind": bytes_of_value(9, 0x20),
    "closed descriptors": close_descriptors,
    "closed control": close_control,
}
