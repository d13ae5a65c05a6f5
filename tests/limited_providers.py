"""Providers that use what their process has: memory, output, signals."""

import ctypes
import os
import resource
import signal
import subprocess
import threading

import numpy

from outrider.providers.contract import Claim, Provider


class Told(Provider):
    """Computes what its process is allowed: [cores, first core, niceness, soft core limit, threads]."""

    def setup(self, context):
        self.threads = context.threads

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit):
        def run(inputs):
            cores = sorted(os.sched_getaffinity(0))
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            core = resource.getrlimit(resource.RLIMIT_CORE)[0]
            return [numpy.array([[len(cores), cores[0], nice, core, self.threads]], numpy.float32)]

        return run


class Greedy(Provider):
    """Takes as many MiB as the first element says, in the way its option says."""

    def setup(self, context):
        self.how = context.options["how"]

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit):
        def run(inputs):
            nbytes = int(inputs[0].flat[0]) << 20
            if self.how == "numpy":
                numpy.ones(nbytes, numpy.uint8)
            elif not ctypes.CDLL(None).calloc(1, ctypes.c_size_t(nbytes)):
                os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
                ctypes.CDLL(None).abort()
            return [inputs[0]]

        return run


class Loud(Provider):
    """Writes as many KiB as the first element says, by the C library, to standard output or error."""

    def setup(self, context):
        self.fd = context.options.get("fd", 2)
        self.line = context.options.get("line", b"x" * 63 + b"\n")

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit):
        def run(inputs):
            data = self.line * (65536 // len(self.line))
            for _ in range(int(inputs[0].flat[0]) // 64):
                os.write(self.fd, data)
            return [inputs[0]]

        return run


class LoudAside(Loud):
    """Writes without end from a thread of its own, from the first run on; dies of a zero."""

    def compile(self, unit):
        def write():
            data = self.line * (65536 // len(self.line))
            while True:
                os.write(self.fd, data)

        def run(inputs):
            if not any(one.name == "loud" for one in threading.enumerate()):
                threading.Thread(target=write, name="loud", daemon=True).start()
            if not inputs[0].any():
                os.kill(os.getpid(), signal.SIGKILL)
            return [inputs[0]]

        return run


class Crashes(Provider):
    """Ends by the signal that its option names, after a word to standard error from native code."""

    def setup(self, context):
        self.number = signal.Signals[context.options["signal"]]
        self.takes_over = context.options.get("takes_over", False)
        if context.options.get("phase") == "start":
            self.crash()

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes]

    def crash(self):
        libc = ctypes.CDLL(None)
        libc.dprintf(2, b"native: %d is poisoned\n", 7)
        if self.takes_over:
            libc.signal(int(self.number), ctypes.c_void_p(0))
        if self.number == signal.SIGSEGV:
            ctypes.string_at(0)
        if self.number == signal.SIGABRT:
            libc.abort()
        os.kill(os.getpid(), self.number)

    def compile(self, unit):
        def run(inputs):
            self.crash()

        return run


class LeavesALoudChild(Provider):
    """Starts a process that leaves the group and writes without end; the option `marker` names a file for its id."""

    def setup(self, context):
        child = subprocess.Popen(["yes"], start_new_session=True)
        with open(context.options["marker"], "w") as file:
            file.write(str(child.pid))

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit):
        def run(inputs):
            os.kill(os.getpid(), signal.SIGKILL)

        return run
