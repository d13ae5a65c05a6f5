"""How the process of an incarnation is made: its boot record, what it inherits, its environment, its command line.

    [our interpreter, dies with us] -> [wrap ...] -> interpreter -P -c _BOOT -> providers/boot.py
                                                    one elsewhere -c _BOOT_ELSEWHERE -> the same, out of a zip

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

from outrider import __version__
from outrider.providers.contract import ProviderUnavailableError
from outrider.providers.wire import messages
from outrider.scheduler.carried import carried
from outrider.scheduler.interpreters import dying_with_us, interpreter, surroundings
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.worker import Incarnation, Worker
from outrider.shm.channel import PairChannel
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
# In another environment: its own packages, and those of the zip argv[2], before which no other `outrider` may come.
_BOOT_ELSEWHERE = """
import sys
sys.path[:] = [sys.argv[2], *filter(None, sys.path)]
for name in [name for name in sys.modules if name.partition(".")[0] == "outrider"]:
    del sys.modules[name]
import outrider
if not outrider.__file__.startswith(sys.argv[2]):
    sys.exit("%s (version %s) comes before Outrider %s, whose session this is" % (
        outrider.__file__, getattr(outrider, "__version__", "unknown"), sys.argv[3]))
from outrider.providers.boot import main
main(int(sys.argv[1]), None)
"""


def launch(one: Incarnation, endpoint: int, coordinator: int) -> None:
    """Start the process; the incarnation gets `process`, `pidfd`, `channel`, `pair`, `progress`, `stacks`, `output_fd`.

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
        control, packages = -1, -1
        control_pair: PairChannel | None = None
        if spec.python is not None:
            near, far = pair()
            control_pair = PairChannel(near, messages.MAX_BYTES)
            kept.callback(control_pair.close)
            given.callback(far.close)
            control, packages = far.fileno(), carried(interpreter(spec.python))
            given.callback(os.close, packages)
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
            "control": control,
            "progress": progress,
            "stacks": stacks.fileno(),
        }
        os.write(boot, msgpack.packb(record))
        os.lseek(boot, 0, os.SEEK_SET)
        inherited = [boot, coordinator, endpoint, bell, theirs.fileno(), progress, stacks.fileno()]
        if spec.python is None:
            command = [sys.executable, "-P", "-c", _BOOT, str(boot), *_paths()]  # -P: Python adds no folder of its own
        else:
            place = f"/proc/self/fd/{packages}"
            command = [interpreter(spec.python), "-c", _BOOT_ELSEWHERE, str(boot), place, __version__]
            inherited += [control, packages]
        process = subprocess.Popen(
            [*_wrapper(spec, worker.name, env), *command],
            stdin=None if spec.debug and spec.wrap else subprocess.DEVNULL,  # a debugger asks what to do
            stdout=None if spec.debug else writer,
            stderr=None if spec.debug else writer,
            env=env,
            pass_fds=inherited,
            start_new_session=True,
        )
        kept.callback(process.wait)
        kept.callback(process.kill)
        one.progress = ProgressReader(progress)
        one.pidfd = os.pidfd_open(process.pid)
        kept.pop_all()
    one.process = process
    one.channel = DescriptorChannel(ours)
    one.pair = control_pair
    one.stacks = stacks
    one.output_fd = reader


def environment(worker: Worker) -> dict[str, str]:
    """The environment variables of a worker: ours, no spinning thread pools, its thread count, and what its spec adds.

    For an interpreter elsewhere, ours are made those of its environment (`surroundings`).
    """
    threads = str(worker.threads)
    fixed = {
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_THREAD_TIMEOUT": "4",  # the default burns 112 ms of CPU after each GEMM
        "OMP_WAIT_POLICY": "passive",
    }
    spec = worker.spec
    ours = dict(os.environ) if spec.python is None else surroundings(spec.python, os.environ)
    return {**ours, **fixed, **spec.env}


def _wrapper(spec: ProviderSpec, name: str, env: dict[str, str]) -> list[str]:
    """What comes before the worker's own command line."""
    if not spec.wrap:
        return []
    if shutil.which(spec.wrap[0], path=env.get("PATH")) is None:
        reason = f"its wrap={list(spec.wrap)} needs the program {spec.wrap[0]!r}, which is not on PATH"
        raise ProviderUnavailableError(f"provider {name} is not available: {reason}", provider=name, reason=reason)
    return dying_with_us(list(spec.wrap))


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
