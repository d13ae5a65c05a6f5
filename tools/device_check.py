"""What CUDA does between two processes on this machine, measured: `python tools/device_check.py [--json PATH]`.

Needs CuPy, NumPy and a GPU; item 8 an onnxruntime with CUDA as well. Each item is measured in two processes of its own
(`device_items.py`), which are killed when their time is up, so an item that fails, crashes or hangs costs its own
figures only. The process that you start never touches the GPU. All of it takes less than four minutes.

Exit code: 0 when the items were tried (each says by itself how it went), 2 when there is no CuPy or no GPU, or for a
wrong argument.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple


class Item(NamedTuple):
    """One item: `name` of its roles in `device_items.py`, seconds it may take, the role that ends itself by SIGKILL."""

    title: str
    name: str
    limit: float
    roles: tuple[str, ...] = ("exporter", "importer")
    dies: str = ""


ITEMS = {
    1: Item("opening memory of another process", "open", 30),
    2: Item("importing a pool and its pointers", "pool", 30),
    3: Item("from an event's record to the wait for it", "event", 20),
    4: Item("copies between a memfd and the device", "host", 30, ("exporter",)),
    5: Item("copies on the device from imported memory", "copy", 20),
    6: Item("the exporter is killed", "exporter's death", 20, dies="exporter"),
    7: Item("the importer is killed", "importer's death", 20, dies="importer"),
    8: Item("ONNX Runtime on imported memory", "ort", 40),
    9: Item("start of a process until it is ready", "start", 15, ("exporter",)),
}
TOTAL_SECONDS = 230.0
PROBE_SECONDS = 20.0


class Child:
    """A process of this file; what it prints goes to files, so that nobody waits for a reader."""

    def __init__(self, what: str, end: socket.socket | None = None) -> None:
        self._files = [os.fdopen(os.memfd_create("device-check-output"), "w+b") for _ in range(2)]
        fds = [] if end is None else [end.fileno()]
        self.process = subprocess.Popen(
            # -P: in the folder of these files lies an inspect.py that is not Python's.
            [sys.executable, "-P", os.path.join(os.path.dirname(os.path.abspath(__file__)), "device_items.py"), what]
            + [str(fd) for fd in fds],
            stdin=subprocess.DEVNULL, stdout=self._files[0], stderr=self._files[1], pass_fds=fds,
            env={**os.environ, "DEVICE_CHECK_BORN": str(time.monotonic())},
        )  # fmt: skip

    def wait(self, deadline: float) -> int | None:
        """The exit code; None when it had to be killed."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.process.kill()
            self.process.wait()

    def read(self) -> tuple[list[dict[str, Any]], str]:
        """Its figures, and the last line of its complaints."""
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        figures = [json.loads(line) for line in texts[0].splitlines() if line.startswith('{"name"')]
        return figures, (texts[1].strip().splitlines() or [""])[-1]


def measure(number: int, limit: float) -> dict[str, Any]:
    """Run one item. The result is an entry of 'items' in the JSON: number, title, status, error, seconds, figures."""
    item = ITEMS[number]
    started = time.monotonic()
    children: dict[str, Child] = {}
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        for role, end in zip(item.roles, ends, strict=False):
            children[role] = Child(f"{item.name} {role}", end)
    finally:
        for end in ends:
            end.close()
    codes = {role: child.wait(started + limit) for role, child in children.items()}
    figures: list[dict[str, Any]] = []
    errors = []
    for role, child in children.items():
        told, complaint = child.read()
        figures += told
        code, expected = codes[role], -signal.SIGKILL if item.dies == role else 0
        if code is None:
            errors.append(f"{role}: killed, it took more than {limit:.0f} s")
        elif code != expected:
            errors.append(f"{role}: {complaint or f'ended with exit code {code}'}")
    status = "ok" if not errors else "killed" if None in codes.values() else "failed"
    return {
        "number": number, "title": item.title, "status": status, "error": "; ".join(errors),
        "seconds": time.monotonic() - started, "figures": figures,
    }  # fmt: skip


def skipped(number: int, reason: str) -> dict[str, Any]:
    """The entry of an item that was not tried."""
    return {
        "number": number, "title": ITEMS[number].title, "status": "skipped", "error": reason, "seconds": 0.0,
        "figures": [],
    }  # fmt: skip


def lines(document: dict[str, Any]) -> list[str]:
    """The table."""
    rows = [[name, str(value)] for name, value in document["machine"].items()]
    rows += [["missing", document["missing"]]] if document["missing"] else []
    for item in document["items"]:
        rows.append([f"{item['number']} {item['title']}", item["status"], item["error"]])
        for figure in item["figures"]:
            value = figure["value"] if isinstance(figure["value"], str) else f"{figure['value']:.4g}"
            rows.append([f"    {figure['name']}", value, figure["unit"]])
    width = max(len(row[0]) for row in rows)
    return ["  ".join([row[0].ljust(width), row[1], *filter(None, row[2:])]) for row in rows]


def check(numbers: Sequence[int]) -> dict[str, Any]:
    """Try these items. Returns {machine, missing, items}; `missing` says why nothing could be tried, '' otherwise."""
    started = time.monotonic()
    machine = {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    document: dict[str, Any] = {"machine": machine, "missing": "", "items": []}
    child = Child("probe")
    code = child.wait(started + PROBE_SECONDS)
    told, complaint = child.read()
    facts = {figure["name"]: figure["value"] for figure in told}
    no_runtime = facts.pop("no ONNX Runtime", "unknown")
    machine.update(facts)
    if code != 0:
        late = f"the GPU was not there within {PROBE_SECONDS:g} s"
        document["missing"] = late if code is None else complaint or f"the probe ended with exit code {code}"
        return document
    for number in numbers:
        left = started + TOTAL_SECONDS - time.monotonic()
        if number == 8 and no_runtime:
            document["items"].append(skipped(number, no_runtime))
        elif left < 2:
            document["items"].append(skipped(number, "no time is left"))
        else:
            document["items"].append(measure(number, min(ITEMS[number].limit, left)))
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the page above for exit codes."""
    parser = argparse.ArgumentParser(prog="device_check", description="Measure what CUDA does between two processes.")
    parser.add_argument("--json", metavar="PATH", help="write the result there as well")
    parser.add_argument("--items", metavar="LIST", help="which to try, for example 1,3 (default: all)")
    args = parser.parse_args(arguments)
    try:
        numbers = [int(part) for part in args.items.split(",")] if args.items else list(ITEMS)
    except ValueError:
        numbers = [0]
    if not set(numbers) <= set(ITEMS):
        parser.error(f"--items takes numbers from 1 to {len(ITEMS)}, not {args.items!r}")
    document = check(numbers)
    print("\n".join(lines(document)))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(document, file, indent=2)
    return 2 if document["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
