"""`tools/device_check.py` where there is no GPU: it says so; and on a device made of memory: it measures, and bears it
when an item fails or hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from outrider.tools import device_check
from outrider.tools.device_items import ROLES, add_model
from tests import fake_cupy
from tests.oracle import run_ort

Check = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs the command with a fake CuPy; gives the exit code, the JSON and what was printed."""
    shutil.copy(fake_cupy.__file__, tmp_path / "cupy.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(*arguments: str, mode: str = "") -> tuple[int, dict[str, Any], str]:
        monkeypatch.setenv("FAKE_CUPY", mode)
        path = tmp_path / "result.json"
        code = device_check.main([*arguments, "--json", str(path)])
        return code, json.loads(path.read_text()), capsys.readouterr().out

    return run


def figures(document: dict[str, Any], number: int) -> dict[str, Any]:
    (item,) = (item for item in document["items"] if item["number"] == number)
    assert (item["status"], item["error"]) == ("ok", "")
    return {figure["name"]: figure["value"] for figure in item["figures"]}


def test_as_a_file_without_cupy_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ModuleNotFoundError(\"No module named 'cupy'\")")
    path = tmp_path / "result.json"
    command = [sys.executable, device_check.__file__, "--json", str(path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    document = json.loads(path.read_text())
    assert (done.returncode, done.stderr, document["items"]) == (2, "", [])
    assert "No module named 'cupy'" in document["missing"] and document["missing"] in done.stdout


def test_without_a_device_it_says_so(check: Check) -> None:
    code, document, printed = check(mode="none")
    assert code == 2 and document["items"] == []
    assert "no CUDA-capable device" in document["missing"] and "missing" in printed


def test_items_measure(check: Check) -> None:
    code, document, printed = check("--items", "1,3,6,7,9")
    assert code == 0 and document["missing"] == ""
    assert document["machine"]["device"] == "memory"
    assert figures(document, 1)["2 MiB, contents"] == "right"
    assert {"2 MiB, first open", "2 MiB, opened while open", "2 MiB, opened again"} <= set(figures(document, 1))
    assert figures(document, 3)["there and back, with an event"] > 0
    after = figures(document, 6)
    assert after["contents"] == "right" and after["the context lives on"] == "ok"
    assert "InvalidResourceHandle" in after["open it again"]
    assert figures(document, 7)["free what the dead had open"] == "ok"
    assert 0 < figures(document, 9)["process started"] < figures(document, 9)["ready after"]
    assert "1 opening memory of another process" in printed and "first open" in printed


def test_an_item_that_fails_or_is_not_there_costs_itself_only(check: Check) -> None:
    code, document, printed = check("--items", "1,2,8,9", mode="fails")
    assert code == 0
    by_number = {item["number"]: item for item in document["items"]}
    assert by_number[1]["status"] == "failed" and "no handle" in by_number[1]["error"]
    assert by_number[2]["status"] == "failed" and by_number[2]["figures"] == []  # no driver here
    assert by_number[8]["status"] == "skipped" and "onnxruntime" in by_number[8]["error"]
    assert by_number[9]["status"] == "ok"
    assert by_number[1]["error"] in printed


def test_an_item_that_hangs_is_killed(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_check.ITEMS, 5, device_check.ITEMS[5]._replace(limit=1.0))
    _, document, _ = check("--items", "5", mode="hangs")
    assert document["items"][0]["status"] == "killed" and "more than 1 s" in document["items"][0]["error"]


def test_the_time_of_all_items_is_bounded_and_each_has_its_roles() -> None:
    limits = [item.limit for item in device_check.ITEMS.values()]
    assert sum(limits) <= device_check.TOTAL_SECONDS < 240
    assert {f"{item.name} {role}" for item in device_check.ITEMS.values() for role in item.roles} == set(ROLES)


@pytest.mark.parametrize("items", ["0", "1,x", "10"])
def test_unknown_items_are_an_error(items: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        device_check.main(["--items", items])
    assert stopped.value.code == 2 and "1 to 9" in capsys.readouterr().err


def test_the_model_of_onnx_runtime_is_one() -> None:
    onnx.checker.check_model(onnx.load_from_string(add_model(300)))
    x = np.arange(300, dtype=np.float32)
    np.testing.assert_array_equal(run_ort(add_model(300), {"x": x})["y"], 2 * x)
