"""`outrider doctor`: what this machine has of what Outrider needs, and which providers start."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.scheduler.cores import usable_cores
from outrider.scheduler.errors import OutriderError
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.report import format_bytes
from outrider.scheduler.spec_file import read_providers
from outrider.scheduler.spec_text import split_entries
from outrider.scheduler.specs import VARIABLE, parse_provider
from outrider.shm.segment import SEGMENT_BYTES, Segment, create_segment, read_only
from outrider.tools import probing
from outrider.tools.opening import add_provider_arguments, progress
from outrider.tools.text import milliseconds, plain

if TYPE_CHECKING:  # doctor may be asked which packages are missing
    from outrider.scheduler import Fleet

_PACKAGES = ("outrider", "onnx", "numpy", "pyzmq", "msgpack", "rich", "ml_dtypes", "onnxruntime")


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "doctor", help="check this machine, or one provider",
        description="Check this machine and start each provider once; with --probe look at one provider closely.",
    )  # fmt: skip
    add_provider_arguments(parser, "cpu,null")
    probing.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Exit code 0 if everything needed is there and every provider starts, else 3; with --probe see `probing`."""
    if args.probe is not None:
        return probing.probe(args)
    checks = [
        _check(name, probe)
        for name, probe in {
            "packages": _packages, "memfd": _memfd, "eventfd": _eventfd, "pidfd": _pidfd, "sockets": _sockets,
            "memory": _memory, "cores": _cores, "descriptors": _descriptors,
            "compiler": _compiler,
        }.items()
    ]  # fmt: skip
    with progress("starting providers"):
        providers = [_start(entry) for entry in _entries(args)]
    versions = _versions()
    document = {"versions": versions, "checks": checks, "providers": providers}
    if args.json:
        print(json.dumps(plain(document), indent=2))
    else:
        for name, version in versions.items():
            print(f"{name:12} {version}")
        for one in checks:
            print(f"{one['name']:12} {'ok' if one['ok'] else 'FAILS'}: {one['detail']}")
        for one in providers:
            print(f"provider {one['name']}: {one['detail']}")
    return 0 if all(one["ok"] for one in [*checks, *providers]) else 3


def _versions() -> dict[str, str]:
    versions = {"python": f"{platform.python_version()} ({sys.executable})", "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _check(name: str, probe: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"name": name, "ok": True, "detail": probe()}
    except OutriderError as error:
        return {"name": name, "ok": False, "detail": str(error)}
    except (OSError, ImportError, AttributeError) as error:  # AttributeError: Python was built without it
        return {"name": name, "ok": False, "detail": f"{type(error).__name__}: {error}"}


def _packages() -> str:
    importlib.import_module("outrider.scheduler.session")  # and with it everything that a session needs
    return "all that are needed can be imported"


def _memfd() -> str:
    handle = create_segment("outrider-doctor")
    try:
        shared = read_only(handle)
        try:
            segments = [Segment(handle, writable=True), Segment(shared, writable=False)]
        finally:
            os.close(shared)
        segments[0].populate(0, 1, "a page")
    finally:
        os.close(handle)
    return f"a sealed segment of {format_bytes(SEGMENT_BYTES)}, mapped writable and, opened again, read-only"


def _eventfd() -> str:
    handle = os.eventfd(0, os.EFD_CLOEXEC)
    os.close(handle)
    return "available"


def _pidfd() -> str:
    handle = os.pidfd_open(os.getpid())
    os.close(handle)
    return "available"


def _sockets() -> str:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.close()
    far.close()
    path = tempfile.mkdtemp(prefix="outrider-")
    try:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(f"/proc/self/fd/{folder}/control")  # as a fleet does: paths of sockets end at 107 bytes
        finally:
            os.close(folder)
    finally:
        shutil.rmtree(path)
    return f"SOCK_SEQPACKET pairs, and sockets in {tempfile.gettempdir()}"


def _memory() -> str:
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    available = int(facts["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    bounded = limit.read_text().strip() if limit.exists() else "max"
    group = "" if bounded == "max" else f", limited to {format_bytes(int(bounded))} by its cgroup"
    return f"{format_bytes(available)} available{group}"


def _cores() -> str:
    shared = "a worker has a thread for each, workers of a pipeline and replicas share them"
    return f"{usable_cores()} usable of {os.cpu_count()}; {shared}"


def _descriptors() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"up to {soft} (hard limit {hard})"


def _compiler() -> str:
    words = os.environ.get("CC", "cc").split() or ["cc"]
    found = shutil.which(words[0])
    if found is None:
        return f"no {words[0]} on PATH; needed only where kernels are to be compiled that no wheel has brought"
    return f"{found}, for kernels that no wheel has brought"


def _entries(args: argparse.Namespace) -> Sequence[ProviderSpec | str]:
    """What to start, each for itself: one that is no provider does not keep the others from being looked at."""
    if args.providers_file is not None:
        return read_providers(args.providers_file)
    return split_entries(args.providers or os.environ.get(VARIABLE, "").strip() or "cpu,null")


def _start(entry: ProviderSpec | str) -> dict[str, Any]:
    """Start one provider in a worker of its own, have the cpu provider load a model, and stop it."""
    name = entry if isinstance(entry, str) else entry.display
    try:
        from outrider.scheduler import Fleet
    except ImportError as error:
        return {"name": name, "ok": False, "detail": f"cannot be started: {error}"}
    start = time.perf_counter()
    try:
        spec = parse_provider(entry)
        name = spec.display
        with Fleet([replace(spec, required="start")]) as fleet:
            seconds = time.perf_counter() - start
            detail, versions = f"starts in {milliseconds(seconds)}", fleet.versions()[name]
            if spec.python is not None:
                detail += f" on {', '.join(map(' '.join, versions.items()))} of {spec.python}"
            told: dict[str, Any] = {
                "name": name, "ok": True, "detail": detail, "seconds": seconds, "versions": versions
            }  # fmt: skip
            if spec.kind == "cpu":
                told["compiled"] = _compiled(fleet, name)
                told["detail"] = f"{detail}; {_kernels(told['compiled'])}"
            return told
    except ImportError as error:
        return {"name": name, "ok": False, "detail": f"starts, and cannot be given a model: {error}"}
    except OutriderError as error:
        return {"name": name, "ok": False, "detail": f"does not start: {error}"}


def _compiled(fleet: Fleet, name: str) -> dict[str, Any]:
    """What the cpu provider says of its compiled kernels when it has loaded a model, which may compile them."""
    from onnx import TensorProto, helper

    from outrider.scheduler import InferenceSession, SessionOptions

    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g", [info("x", TensorProto.FLOAT, [1])],
        [info("y", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with InferenceSession(model, SessionOptions(fleet=fleet)) as session:
        found: dict[str, Any] = session.stats()["providers"][name]["compiled"]
    return found


def _kernels(compiled: dict[str, Any]) -> str:
    if "target" not in compiled:
        return f"NumPy kernels only: {compiled['reason']}"
    return f"compiled kernels for {compiled['target']} from the {compiled['from']}: {', '.join(compiled['families'])}"
