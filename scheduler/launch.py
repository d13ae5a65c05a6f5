"""How the process of an incarnation is made: its boot record, what it inherits, its environment, its command line.

    [our interpreter, dies with us] -> [wrap ...] -> interpreter -P -c _BOOT -> providers/boot.py

The first is there only for a worker that is wrapped: a debugger would otherwise outlive us. Everything is set by `exec`
or by the worker for itself; no code of ours runs between fork and exec. Must be called on a thread that lives as long
as the worker may, since a worker dies with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys

import msgpack

from outrider.providers.contract import ProviderUnavailableError
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.worker import Incarnation, Worker
from outrider.shm.descriptors import DescriptorChannel, pair
from outrider.shm.progress import ProgressReader, create_progress
from outrider.shm.stackfile import StackFile

# Without the folders of argv[3] while a worker imports itself: a numpy.py beside a model is not NumPy.
_BOOT = (
    "import sys, json; path, without = map(json.loads, sys.argv[2:4]); "
    "sys.path[:] = [entry for entry in path if entry not in without]; "
    "from outrider.providers.boot import main; main(int(sys.argv[1]), path)"
)
_NEEDED = ("outrider", "numpy", "zmq", "msgpack")
# PR_SET_PDEATHSIG, SIGKILL: kept through exec. Who started it may be gone before that.
_WRAPPED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9), 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
)


def launch(one: Incarnation, endpoint: int, coordinator: int) -> None:
    """Start the process, and give the incarnation its `process`, `pidfd`, `channel`, `progress`, `stacks`, `output_fd`.

    `endpoint`: descriptor of the control socket's file. `coordinator`: our own pidfd. `output_fd` is what it writes to
    its standard output and error, not blocking; -1 if that goes to ours (`debug`). Raises OSError, ValueError,
    TypeError, and ProviderUnavailableError for a wrapper that is not there; then nothing is left.
    """
    worker, spec = one.worker, one.worker.spec
    env = environment(worker)
    with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:  # the latter for what fails half-way
        ours, theirs = pair()
        kept.callback(ours.close)
        given.callback(theirs.close)
        boot = os.memfd_create("outrider-boot", os.MFD_CLOEXEC)
        given.callback(os.close, boot)
        reader = writer = -1
        if not spec.debug:
            reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            kept.callback(os.close, reader)
            given.callback(os.close, writer)
            os.set_blocking(writer, True)
        progress = create_progress()
        given.callback(os.close, progress)
        stacks = StackFile()
        kept.callback(stacks.close)
        bell = worker.bell.fileno()
        record = {
            "endpoint": f"ipc:///proc/self/fd/{endpoint}",
            "identity": one.identity.decode(),
            "name": worker.name,
            "kind": worker.kind,
            "part": worker.part,
            "options": dict(spec.options),
            "device": worker.device,
            "threads": worker.threads,
            "incarnation": one.number,
            "spare": one.ahead,
            "parent": os.getpid(),
            "wrapped": bool(spec.wrap),
            "limits": {"memory": spec.memory_limit, "cpus": spec.cpus, "nice": spec.nice, "core": spec.debug},
            "coordinator": coordinator,
            "doorbell": bell,
            "channel": theirs.fileno(),
            "progress": progress,
            "stacks": stacks.fileno(),
        }
        os.write(boot, msgpack.packb(record))
        os.lseek(boot, 0, os.SEEK_SET)
        command = [sys.executable, "-P", "-c", _BOOT, str(boot), *_paths()]  # -P: Python adds no folder of its own
        process = subprocess.Popen(
            [*_wrapper(spec, worker.name, env), *command],
            stdin=None if spec.debug and spec.wrap else subprocess.DEVNULL,  # a debugger asks what to do
            stdout=None if spec.debug else writer,
            stderr=None if spec.debug else writer,
            env=env,
            pass_fds=(boot, coordinator, endpoint, bell, theirs.fileno(), progress, stacks.fileno()),
            start_new_session=True,
        )
        kept.callback(process.wait)
        kept.callback(process.kill)
        one.progress = ProgressReader(progress)
        one.pidfd = os.pidfd_open(process.pid)
        kept.pop_all()
    one.process = process
    one.channel = DescriptorChannel(ours)
    one.stacks = stacks
    one.output_fd = reader


def environment(worker: Worker) -> dict[str, str]:
    """The environment of a worker: ours, no spinning thread pools, its thread count, and what its spec adds."""
    threads = str(worker.threads)
    fixed = {
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_THREAD_TIMEOUT": "4",  # the default burns 112 ms of CPU after each GEMM
        "OMP_WAIT_POLICY": "passive",
    }
    return {**os.environ, **fixed, **worker.spec.env}


def _wrapper(spec: ProviderSpec, name: str, env: dict[str, str]) -> list[str]:
    """What comes before the worker's own command line."""
    if not spec.wrap:
        return []
    if shutil.which(spec.wrap[0], path=env.get("PATH")) is None:
        reason = f"its wrap={list(spec.wrap)} needs the program {spec.wrap[0]!r}, which is not on PATH"
        raise ProviderUnavailableError(f"provider {name} is not available: {reason}", provider=name, reason=reason)
    return [sys.executable, "-I", "-S", "-c", _WRAPPED, str(os.getpid()), *spec.wrap]


def _paths() -> tuple[str, str]:
    """The worker's `sys.path`, and what it does without until it has imported itself: the current folder. As JSON."""
    try:
        here = [os.getcwd()]
    except OSError:  # it was removed
        here = []
    # As the import system does, this skips what is no text; what is relative means nothing without a current folder.
    path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str) and (here or os.path.isabs(entry))]
    ours = {os.path.dirname(os.path.dirname(str(sys.modules[name].__file__))) for name in _NEEDED}
    return json.dumps(path), json.dumps([folder for folder in here if folder not in ours])
