"""A provider that is wrong in many ways, one per operator: `outrider conformance` names each of them rightly."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from outrider.tools.cli import main

SPEC = f"{os.path.join(os.path.dirname(os.path.abspath(__file__)), 'stranger_provider.py')}:Stranger"
# case -> what it comes to, and words that name what is wrong
FAULTS = {
    "own/Sigmoid-float32": ("MISMATCH", "should return dtype float32 for 'y', it returned float64"),
    "own/Sigmoid-float64": ("PASS", ""),
    "own/Add-float32": ("PASS", ""),
    "own/Add-broadcast-columns": ("MISMATCH", "16 of 24 elements beyond tolerance"),
    "own/Relu-float32": ("ERROR", "It writes to its inputs, which are read-only"),
    "own/Exp-float32": ("CRASH", "SIGSEGV in run at Exp.0 Native code .* wrote to an input"),
    "own/Abs-float32": ("PASS", ""),
    "own/Abs-int64": ("CRASH", "SIGSEGV in run at Abs.0 .* in string_at"),
    "own/Neg-int64": ("ERROR", "NotImplementedError: only floats.* It claims what it cannot run"),
    "own/Sub-float32": ("PASS", ""),
    "contract/repeated/Sub": ("MISMATCH", "24 of 24 elements beyond tolerance"),
    "contract/repeated/Mul": ("PASS", ""),
    "contract/shapes/Mul": ("MISMATCH", "should return rank 2 for 'y', it returned rank 1"),
    "own/Sqrt-float32": ("PASS", ""),
    "own/LayerNormalization-float32": ("PASS", ""),
    "own/LayerNormalization-three-axes-float32": ("MISMATCH", "elements beyond tolerance"),
    "own/Softmax-float32": ("UNSUPPORTED", "no such kernel"),
}


def tried(capsys: pytest.CaptureFixture[str], *only: str, deadline: int) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the cases by name."""
    chosen = [argument for name in only for argument in ("--only", name)]
    code = main(["conformance", SPEC, "--quick", "--json", "--deadline", str(deadline), *chosen])
    return code, {one["name"]: one for one in json.loads(capsys.readouterr().out)["cases"]}


def test_each_fault_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = tried(capsys, *FAULTS, deadline=100)
    assert code == 1
    wrong = []
    for name, (kind, words) in FAULTS.items():
        one = found.get(name)
        text = " ".join(f"{one['reason']} {one['hint']} {one['detail']}".split()) if one else ""
        if one is None or one["kind"] != kind or not re.search(words, text):
            wrong.append(f"{name}: {one}")
    assert not wrong, "\n".join(wrong)


def test_what_hangs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = tried(capsys, "contract/empty/Tanh", deadline=3)
    assert code == 1
    (one,) = [case for name, case in found.items() if name == "contract/empty/Tanh"]
    assert one["kind"] == "HANG" and "in tanh" in one["detail"]
