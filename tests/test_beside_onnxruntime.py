"""The page beside ONNX Runtime: the faulty library is built and run both ways; what the page says is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.beside_onnxruntime import show
from tests import plugins

pytestmark = pytest.mark.skipif(show.compiler() is None, reason="no C compiler on this machine")

# All that the program prints, and how it ends: None if it has to be killed.
IN_PROCESS = {
    "segfault": (["registering the plugin"], -11),
    "hang": (["registering the plugin"], None),
    "kernel": (["good input: [1. 2. 3. 4.]", "3 s after terminate = True the run is still running"], None),
    "twice": (["Fail [ONNXRuntimeError] : 1 : FAIL : Provider cpu_ep has already been registered."], 0),
}
# Patterns of some of it, in this order; it ends with exit code 0.
WITH_OUTRIDER = {
    "segfault": [
        r"ProviderUnavailableError: provider vendor .*SIGSEGV", r"library\.py\", line \d+ in \w+",
        r"vendor: absent", r"by cpu: \[1\. 2\. 3\. 4\.\]",
    ],
    "hang": [r"vendor: .*it did not start within 10 s", r"by cpu: \[1\. 2\. 3\. 4\.\]"],
    "kernel": [
        r"good input: \[1\. 2\. 3\. 4\.\]", r"RunTimeoutError: .* 1 s", r"partition 0 \(root\)",
        r"vendor_provider\.py\", line \d+ in <lambda>", r"good input: \[1\. 2\. 3\. 4\.\]",
        r"bad input, after \d+ s: \[ 1\.  2\.  3\. nan\]", r"quarantined: \[.*'nodes': \['root'\]",
        r"good input: \[1\. 2\. 3\. 4\.\]",
    ],
    "twice": [r"first: ort:cpu_ep\n", r"second: ort:cpu_ep:1\n", r"fourth roots: \[1\. 2\. 3\. 4\.\]"],
}  # fmt: skip


def library(fault: str, folder: Path) -> Path:
    if fault != "twice":
        return show.build(folder, fault)
    plugins.skip_if_unreachable()
    return plugins.nxrt().library


@pytest.mark.parametrize("fault", show.FAULTS)
def test_in_process_the_fault_is_the_end(fault: str, tmp_path: Path) -> None:
    shown = show.run("in_process", fault, library(fault, tmp_path))
    assert (shown.printed.splitlines(), shown.code) == IN_PROCESS[fault]


@pytest.mark.parametrize("fault", WITH_OUTRIDER)
def test_with_outrider_the_program_goes_on(fault: str, tmp_path: Path) -> None:
    shown = show.run("with_outrider", fault, library(fault, tmp_path))
    assert shown.code == 0, shown.printed
    assert re.search(".*".join(WITH_OUTRIDER[fault]), shown.printed, re.DOTALL), shown.printed


def test_the_page_shows_these_programs_and_their_ends() -> None:
    page = show.PAGE.read_text()
    for fault, title in show.FAULTS.items():
        section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        for program in show.PATIENCE:
            assert show.source(program, fault) in section
        lines, code = IN_PROCESS[fault]
        assert "\n".join([*lines, f"[the process: {show.Shown('', code).ended()}]"]) in section
        assert re.search(".*".join(WITH_OUTRIDER[fault]), section, re.DOTALL)
