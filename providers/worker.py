"""The worker process, from where `boot.py` has put it in order; started by the coordinator's monitor thread.

Two threads. *main* owns the provider: it imports it, answers claims, compiles, and runs partitions, blocked on the
worker's doorbell in between. *control* (`control.py`) owns the channel to the coordinator.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import logging
import os
import platform
import socket
import sys
from typing import Any, NoReturn

import numpy as np

from outrider.providers.adapters import Compiler
from outrider.providers.constants import Constants, LazyConstants
from outrider.providers.contract import (
    Capabilities,
    Claim,
    Context,
    Decline,
    Provider,
    ProviderContractError,
    ProviderUnavailableError,
)
from outrider.providers.control import Control, connect
from outrider.providers.host import LoadedSession, Services
from outrider.providers.lanes import LaneGroup, Present
from outrider.providers.loading import BUILT_IN, load_provider
from outrider.providers.programs import Programs
from outrider.providers.states import States, states_of
from outrider.providers.traits import Traits, lacking, traits_of
from outrider.providers.wire import messages
from outrider.providers.wire.failures import error_to_plain, plain, text_of
from outrider.providers.wire.graph import Graph
from outrider.providers.wire.onnx_model import OnnxModel
from outrider.providers.wire.pack import unpack_graph, unpack_model
from outrider.providers.wire.spans import Recorder, Trace, plain_span, timed
from outrider.shm.descriptors import DescriptorChannel
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import OutriderError
from outrider.shm.progress import CLAIM, LOAD, START, STOP, ProgressWriter
from outrider.shm.spin import Spin

EXIT_START = 3  # the provider did not start; the coordinator does not try again
DESCRIPTOR_SECONDS = 30.0

_NO_SPIN = Spin(0)

log = logging.getLogger("outrider.worker")


class Worker:
    """What main does: one provider, the sessions loaded on it, and the messages about them."""

    def __init__(self, boot: dict[str, Any], refused: str | None) -> None:
        self.refused = refused
        self.name: str = boot["name"]
        self.bell = Doorbell() if boot["spare"] else Doorbell(boot["doorbell"])
        self.channel = DescriptorChannel(socket.socket(fileno=boot["channel"]))
        control, self.pyzmq = connect(boot["endpoint"], boot["identity"].encode(), boot["control"])
        self.control = Control(control, boot["coordinator"], self.bell)
        self.boot = boot
        self.progress = ProgressWriter(boot["progress"])
        os.close(boot["progress"])
        self.sessions: dict[int, LoadedSession] = {}
        self.weights: dict[int, dict[int, int]] = {}  # session -> weight segment -> its descriptor
        self.constants: dict[int, Constants] = {}
        self.programs: dict[int, Programs] = {}
        self.recorders: dict[int, Recorder] = {}  # of sessions that are or were traced
        self.trace = Trace()
        self.present = Present()
        # The run slots of all sessions, flat: a fleet may hold many sessions, and each wake looks at all of them.
        self._watched: list[tuple[memoryview, int, LaneGroup, LoadedSession]] = []
        self.provider: Provider
        self.traits: Traits
        self.states: States | None = None  # for a provider that saves what it compiled

    def start(self) -> None:
        """Import and set up the provider; say Hello, or StartFailed and exit."""
        self.control.start()
        boot = self.boot
        self.progress.begin(START)
        try:
            if self.refused is not None:
                raise ProviderUnavailableError(self.refused, provider=self.name, reason=self.refused)
            self.provider = load_provider(boot["kind"])
            logger = logging.getLogger(f"outrider.provider.{self.name}")
            cancelled, incarnation = self.present.cancelled, boot["incarnation"]
            self.provider.setup(
                Context(
                    boot["options"],
                    boot["device"],
                    boot["threads"],
                    logger,
                    self.trace,
                    cancelled,
                    incarnation,
                    boot["part"],
                )
            )
            self.traits = traits_of(self.provider, self.name)
            if self.traits.saves:
                given = ("kind", "part", "options", "device", "threads")
                self.states = states_of(self.provider, {name: boot[name] for name in given})
        except (Exception, SystemExit) as error:  # a provider may raise anything at start; the user is told
            known = isinstance(error, OutriderError)  # its message says it all
            told = error_to_plain(error)
            reason = told["message"] if known else f"{told['type']}: {told['message']}"
            story = "" if known else told["traceback"]
            self.control.send(messages.StartFailed(boot["incarnation"], reason, story))
            self.control.finish()
            raise SystemExit(EXIT_START) from error
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        if self.pyzmq is not None:
            versions["pyzmq"] = self.pyzmq
        self.control.send(
            messages.Hello(
                os.getpid(),
                boot["incarnation"],
                self.traits.merge,
                self.traits.wants_model,
                self.traits.plain(),
                versions,
            )
        )
        self.progress.end()

    def loop(self) -> None:
        """Serve messages and runs until told to stop."""
        inbox = self.control.inbox
        while True:
            while inbox:
                if not self.handle(inbox.popleft()):
                    return
            spin = self._poll()
            # Whoever sends a message or publishes a word rings after it: to look again first is for nothing, unless
            # it saves being woken.
            if not (spin.wanted and spin.until(self._work_came)):
                try:
                    os.eventfd_read(
                        self.bell.fileno()
                    )  # quicker than os.read, but a signal that a provider handles ends it
                except InterruptedError:
                    continue

    def _poll(self) -> Spin:
        """Run what is ready; the spin of the session that had work."""
        # Not in loop(): its variables would keep a session alive that has been unloaded.
        spin = _NO_SPIN
        for words, start, group, loaded in self._watched:
            if words[start] >> 16 > group.ended:
                loaded.poll()
                spin = loaded.spin
        return spin

    def _work_came(self) -> bool | None:
        return True if self.control.inbox or any(loaded.ready() for loaded in self.sessions.values()) else None

    def handle(self, message: messages.Message) -> bool:
        """One message; False for Stop."""
        self.present.lane = None
        if isinstance(message, messages.Claim):
            recorder = self._recorder(message.session)
            self.progress.begin(CLAIM, message.session, step=message.round)
            with self.trace.into(recorder), timed(recorder, "claim", f"round {message.round}"):
                answer = self.claims(message)
            self.progress.end()
            self.control.send(answer)
        elif isinstance(message, messages.Load):
            self.progress.begin(LOAD, message.session)
            self.load(message)
            self.progress.end()
        elif isinstance(message, messages.Resume):
            self.resume(message)
        elif isinstance(message, messages.Promote):
            self.promote()
        elif isinstance(message, messages.Unload):
            self.unload(message.session)
            self.control.send(messages.Unloaded(message.session))
        elif isinstance(message, messages.StatsRequest):
            self.control.send(messages.Stats(message.request, self.stats()))
        elif isinstance(message, messages.TraceRequest):
            self.control.send(self.traced(message))
        elif isinstance(message, messages.Stop):
            return False
        else:
            log.warning("a worker has no use for %s", type(message).__name__)
        return True

    def _take(self, descriptor: int) -> int:
        return self.channel.take(descriptor, timeout=DESCRIPTOR_SECONDS)

    def _constants(self, session: int, weights: dict[int, int]) -> Constants:
        """The constants of a session; segments are received once, whichever message names them first."""
        held = self.weights.setdefault(session, {})
        for segment, descriptor in weights.items():
            if segment not in held:
                held[segment] = self._take(descriptor)
        return self.constants.setdefault(session, Constants(held))

    def _model(self, packed: dict[str, Any] | None, constants: Constants) -> OnnxModel | None:
        """The ONNX form of a session's model, for a provider that wants one."""
        if packed is None:
            return None
        data, weights, moved, foreign = unpack_model(packed)
        arrays = LazyConstants(constants, weights)
        files = [name for name, ref in weights.items() if ref.path]
        return OnnxModel(constants.array(data).data, arrays, moved, foreign, files)

    def claims(self, message: messages.Claim) -> messages.Claims:
        """Ask the provider; what it raises, or answers against the contract, travels as the error."""
        claims: list[dict[str, Any]] = []
        declines: list[dict[str, Any]] = []
        error: dict[str, Any] | None = None
        try:
            packed = unpack_graph(message.graph)
            constants = self._constants(message.session, message.weights)
            graph = dataclasses.replace(constants.graph(packed), model=self._model(message.model, constants))
            known = {id(node): node.index for node in graph.nodes}
            outside = self._outside(graph)
            for answer in self._answers(graph):
                if isinstance(answer, Claim):
                    nodes = [self._index(known, node) for node in answer.nodes]
                    reason = next((outside[node] for node in nodes if node in outside), "")
                    if reason:
                        declines += [{"node": node, "reason": outside.get(node, reason)} for node in nodes]
                    else:
                        claims.append({"nodes": nodes, "reference": answer.reference, "cost": answer.cost})
                else:
                    declines.append({"node": self._index(known, answer.node), "reason": text_of(answer.reason)})
            told = {decline["node"] for decline in declines}
            declines += [{"node": node, "reason": reason} for node, reason in outside.items() if node not in told]
        except (Exception, SystemExit) as caught:  # a provider may raise anything in claim()
            claims, declines, error = [], [], error_to_plain(caught)
        return messages.Claims(message.session, message.round, claims, declines, error)

    def _outside(self, graph: Graph) -> dict[int, str]:
        """The nodes that the provider cannot be given whatever it answers, and why."""
        capabilities = self.traits.capabilities
        if capabilities == Capabilities():
            return {}
        reasons = {node.index: lacking(node, capabilities) for node in graph.nodes}
        return {index: reason for index, reason in reasons.items() if reason}

    def _answers(self, graph: Graph) -> list[Claim | Decline]:
        answers = self.provider.claim(graph)
        if not isinstance(answers, (list, tuple)):
            raise self._broken("claim() must return a list of Claim and Decline", type(answers).__name__)
        for answer in answers:
            if not isinstance(answer, (Claim, Decline)):
                raise self._broken("claim() must return a list of Claim and Decline", type(answer).__name__)
        return list(answers)

    def _index(self, known: dict[int, int], node: Any) -> int:
        index = known.get(id(node))
        if index is None:
            raise self._broken("claims must name Node objects of the graph that was shown", repr(node)[:200])
        return index

    def _broken(self, expected: str, got: str) -> ProviderContractError:
        return ProviderContractError(
            f"provider {self.name}: {expected}; it gave {got}", provider=self.name, expected=expected, got=got
        )

    def load(self, message: messages.Load) -> None:
        """Compile the session's partitions, in place of an earlier generation."""
        self.unload(message.session, keep=True)
        constants = self._constants(message.session, message.weights)
        programs = self.programs.setdefault(message.session, self._programs())
        programs.model = self._model(message.model, constants)
        recorder = self._recorder(message.session)
        services = Services(
            self.provider,
            self.traits,
            self.name,
            self._take,
            self.control.send,
            self.trace,
            self.progress,
            self.present,
        )
        try:
            with self.trace.into(recorder), timed(recorder, "load", f"{len(message.partitions)} partitions"):
                loaded = LoadedSession(message, services, programs, constants)
            refused = loaded.refused
            if refused:
                loaded.unload()
            else:
                programs.keep(loaded.keys)
                if not message.held:
                    loaded.attach()
                self.sessions[message.session] = loaded
                self._watch()
        except (OutriderError, OSError, MemoryError) as error:
            told = error_to_plain(error)
            reason, traceback = told["message"], told["traceback"]
            refused = [{"partition": -1, "unit": -1, "nodes": [], "reason": reason, "traceback": traceback}]
        self.control.send(messages.Loaded(message.session, message.generation, refused))

    def _programs(self) -> Programs:
        return Programs(Compiler(self.provider, self.traits, self.states), self.name)

    def resume(self, message: messages.Resume) -> None:
        """Serve a session that was held, where the dead predecessor of this worker left off."""
        loaded = self.sessions.get(message.session)
        told: dict[str, Any] | None = None
        if loaded is not None and loaded.generation == message.generation:
            try:
                loaded.attach(message, self.boot["incarnation"])
                self._watch()
            except (OutriderError, OSError, MemoryError) as error:
                told = error_to_plain(error)
        self.control.send(messages.Resumed(message.session, message.generation, told))

    def promote(self) -> None:
        """A spare no more: wait on the doorbell that all know."""
        # What came before the change is in the inbox, which is looked at before anybody waits. The other doorbell stays
        # open: the control thread may be about to ring it.
        self.control.bell = self.bell = Doorbell(self.boot["doorbell"])

    def unload(self, session: int, keep: bool = False) -> None:
        """Forget a session; `keep` its weights and programs, because another generation follows."""
        loaded = self.sessions.pop(session, None)
        if loaded is not None:
            loaded.unload()
            self._watch()
        if not keep:
            programs = self.programs.pop(session, None)
            if programs is not None:
                programs.keep(())
            self.recorders.pop(session, None)
            self.constants.pop(session, None)
            for descriptor in self.weights.pop(session, {}).values():
                os.close(descriptor)

    def _recorder(self, session: int) -> Recorder | None:
        """Where the spans of a session go; None if it is not traced."""
        recorder = self.recorders.get(session)
        return recorder if recorder is not None and recorder.on else None

    def traced(self, message: messages.TraceRequest) -> messages.TraceData:
        """Begin to trace a session, or stop and hand over the next part of its spans."""
        session = message.session
        if message.on:
            self.recorders.setdefault(session, Recorder()).start()
        recorder = self.recorders.get(session)
        if recorder is None:
            return messages.TraceData(message.request, [], 0, {}, 0, True)
        recorder.on = message.on
        if session in self.sessions:
            self.sessions[session].trace_into(self._recorder(session))
        spans = [plain_span(span) for span in recorder.take()]
        return messages.TraceData(
            message.request, spans, len(recorder), dict(recorder.threads), recorder.dropped, False
        )

    def _watch(self) -> None:
        """Look at the slots of the sessions that are loaded now."""
        self._watched = [
            (group.words, group.start, group, loaded) for loaded in self.sessions.values() for group in loaded.groups
        ]

    def stats(self) -> dict[str, Any]:
        """{provider: its own counters, sessions: those of each session by its number}."""
        sessions = {}
        for number, loaded in self.sessions.items():
            recorder, counts = self.recorders.get(number), self.programs[number].compiler.counts
            operators = {} if recorder is None else recorder.operators
            sessions[str(number)] = {**loaded.stats(), **counts, "operators": operators}
        try:
            told = plain(dict(self.provider.stats()))
        except Exception as error:  # anyone's stats()
            told = {"error": f"stats() raised {type(error).__name__}: {text_of(error)}"}
        return {"provider": told, "sessions": sessions}

    def close(self) -> None:
        """Forget all sessions, close the provider, send what is still queued."""
        self.progress.begin(STOP)
        for session in list(self.sessions):
            self.unload(session)
        try:
            self.provider.close()
        except (Exception, SystemExit):  # anyone's close()
            log.exception("provider %s failed to close", self.name)
        self.control.finish()


def main(boot: dict[str, Any], path: list[str] | None, refused: str | None) -> NoReturn:
    """Serve until stopped; never returns.

    `boot`: the boot record. `path`: the coordinator's `sys.path`, for a provider that is not ours; None in another
    environment. `refused`: why the process cannot be bounded as its spec says, which ends it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a provider printed must not be lost when it crashes
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Large graphs are unpacked here: objects by the hundred thousand, which the collector would walk again and again.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    worker = Worker(boot, refused)
    if path is not None and boot["kind"] not in BUILT_IN:  # now that all of ours is imported: see `launch.py`
        sys.path[:] = path
    worker.start()
    worker.loop()
    worker.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of native code must not keep a stopped worker alive
