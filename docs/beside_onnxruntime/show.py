"""Builds the vendor's faulty library, runs each fault both ways and shows what was printed.

    python docs/beside_onnxruntime/show.py            # print
    python docs/beside_onnxruntime/show.py --write    # write docs/beside-onnxruntime.md

Needs a C compiler (`cc`, or $CC) and onnxruntime.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

from outrider.providers.cpu.native.build import cache_folder

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "beside-onnxruntime.md"
PATIENCE = {"in_process": 10.0, "with_outrider": 300.0}  # seconds; the former is waited for in full where it hangs
FAULTS = {
    "segfault": "A plugin that crashes when it is registered",
    "hang": "A plugin that hangs when it is registered",
    "kernel": "A kernel that ignores `terminate`",
    "twice": "Two of one execution provider",
}
ABOUT = {
    "segfault": "The library reads through a null pointer. In process nothing can catch that. In a worker it is a"
    " provider that did not start: an error by default, a note in `health()` with `required=False`. Sessions of the"
    " next day do not even try it, unless it has changed.",
    "hang": "The library waits for a device that does not answer. In process the call never returns, and it has no"
    " time-out; a worker has `start_deadline`.",
    "kernel": "An iteration that never converges for NaN. ONNX Runtime looks at `terminate` between two nodes, so the"
    " run goes on for ever and takes a core with it; here it even keeps the program from ending. With Outrider, first"
    " the run has a deadline, and the caller an error that tells where the worker was. Then the partition has one: the"
    " worker is ended, its successor tries once more, and at last `cpu` computes the node; `vendor` does not get it"
    " again.",
    "twice": "Nothing is faulty here: the library is the plugin of nxrt-ep-cpu, from PyPI. An ONNX Runtime session has"
    " room for one instance of an execution provider, so it cannot use two devices of one kind, nor one device with two"
    " sets of options. In Outrider each instance is a worker of its own, and they share a graph.",
}


@dataclass(frozen=True)
class Shown:
    """What one program printed, both streams, and how it ended: its exit code, or None if it had to be killed."""

    printed: str
    code: int | None

    def ended(self) -> str:
        """The end in words."""
        if self.code is None:
            return f"had not ended after {PATIENCE['in_process']:g} s and was killed"
        return f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"


def compiler() -> str | None:
    """The machine's C compiler, if it has one."""
    return shutil.which(os.environ.get("CC", "cc"))


def build(folder: Path, fault: str) -> Path:
    """Compile the library with this fault, or fetch the one that has none.

    Raises CalledProcessError, RuntimeError without a compiler.
    """
    if fault == "twice":
        return fetch(folder)
    cc = compiler()
    if cc is None:
        raise RuntimeError("no C compiler: install one, or name it in $CC")
    library = folder / f"vendor_{fault}.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", f"-DFAULT={fault.upper()}"]
    subprocess.run([cc, *flags, "-o", str(library), str(HERE / "vendor.c"), "-lm"], check=True)
    return library


def fetch(folder: Path) -> Path:
    """The library in the wheel of nxrt-ep-cpu; nothing is installed. Raises CalledProcessError."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    subprocess.run([*pip, "nxrt-ep-cpu==0.1.0.dev6"], check=True)
    (wheel,) = folder.glob("nxrt_ep_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("nxrt_ep_cpu/libonnx_runtime_ep_cpu_plugin.so", folder))


def run(program: str, fault: str, library: Path) -> Shown:
    """Run `in_process` or `with_outrider` on a library, in a process of its own."""
    place = library.parent / "cache"  # without what was learnt of the library before, but for compiled kernels
    if not place.exists():
        place.mkdir()
        (place / "kernels").symlink_to(cache_folder())
    cache = {"OUTRIDER_CACHE": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile(mode="w+") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / f"{program}.py"), fault, str(library)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **cache},
        )
        try:
            code: int | None = process.wait(PATIENCE[program])
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return Shown(_alike(output.read()), code)


def _alike(text: str) -> str:
    """The text without what differs each time: folders, process ids, addresses, dates, names of cached files."""
    text = re.sub(r"(?<![\w.])(?:/[\w.+~-]+)+/(?=[\w.+-])", "", text)
    text = re.sub(r"\b(process|pid) \d+", r"\1 ...", text)
    text = re.sub(r"\b0x[0-9a-f]{8,}", "0x...", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<date>", text)
    return re.sub(r"\b[0-9a-f]{32}\.json", "<verdict>.json", text)


def source(program: str, fault: str) -> str:
    """The function of that name in a program."""
    text = (HERE / f"{program}.py").read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == fault:
            return ast.get_source_segment(text, node) or ""
    raise LookupError(f"{program}.py has no function {fault}")


def page(shown: dict[tuple[str, str], Shown]) -> str:
    """The page, from what (program, fault) printed."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("outrider", "onnxruntime", "numpy"))
    lines = [
        "# Beside ONNX Runtime in process", "",
        "An execution provider is someone else's native code. ONNX Runtime loads it into your process, Outrider into a",
        "worker. Below is one library with three faults, loaded both ways by the same functions of onnxruntime, and",
        "one that is asked for twice.", "",
        "Everything here was printed by [`show.py`](beside_onnxruntime/show.py), which builds",
        "[`vendor.c`](beside_onnxruntime/vendor.c) and runs [`in_process.py`](beside_onnxruntime/in_process.py) and",
        "[`with_outrider.py`](beside_onnxruntime/with_outrider.py); the provider is",
        "[`vendor_provider.py`](beside_onnxruntime/vendor_provider.py). Folders, addresses and dates were left out.",
        f"Python {platform.python_version()}, {versions}.", "",
    ]  # fmt: skip
    for fault, title in FAULTS.items():
        lines += [f"## {title}", "", *textwrap.wrap(ABOUT[fault], 120), ""]
        for program, name in (("in_process", "ONNX Runtime, in process"), ("with_outrider", "Outrider")):
            told = shown[program, fault]
            lines += [f"### {name}", "", "```python", source(program, fault), "```", ""]
            lines += ["```text", *told.printed.rstrip().splitlines(), f"[the process: {told.ended()}]", "```", ""]
    return "\n".join(lines)


def main() -> None:
    """Run all and print the page, or write it."""
    shown: dict[tuple[str, str], Shown] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-beside-") as folder:
        for fault in FAULTS:
            library = build(Path(folder), fault)
            for program in PATIENCE:
                shown[program, fault] = run(program, fault, library)
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(shown))
    else:
        print(page(shown))


if __name__ == "__main__":
    main()
