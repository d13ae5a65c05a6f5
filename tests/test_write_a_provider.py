"""docs/write-a-provider.md does what it says: its code is run as it stands there, and so are its commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.scheduler import InferenceSession, errors
from outrider.tools.cli import main
from tests.builders import chain, model, node, tensor

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (DOCS / "write-a-provider.md").read_text(), re.M | re.S)
DENSE = DOCS / "write_a_provider" / "dense.py"
PROVIDER = f"{DENSE}:DenseProvider"
F32 = np.float32


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, as the working folder."""
    monkeypatch.chdir(tmp_path)
    for kind, text in BLOCKS:
        name = re.match(r"# (\w+\.py)\n", text)
        if kind == "python" and name:
            (tmp_path / name[1]).write_text(text[name.end() :])
    return tmp_path


def test_its_programs_run(page: Path) -> None:
    names: dict[str, Any] = {"print": lambda *_: None}
    programs = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# ")]
    assert len(programs) == 4
    for text in programs:
        exec(compile(text, "write-a-provider.md", "exec"), names)


def test_its_commands_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = [text.splitlines() for kind, text in BLOCKS if kind == "sh"]
    assert len(commands) == 4
    for line in commands:
        program, *arguments = shlex.split(line, comments=True)
        if arguments[0] == "conformance":
            arguments += ["--deadline", "100", "--only", "*Relu"]
        assert program == "outrider" and main(arguments) == 0, line
    assert "my_provider.py:MyProvider" in capsys.readouterr().out


def test_its_file_that_keeps_what_it_compiled_also_rewrites_it(page: Path) -> None:
    x = np.array([[-1, 2]], F32)
    for loaded in (False, True):
        with InferenceSession(chain("Relu", "Relu", "Relu", "Neg"), providers=["kept.py:Kept"]) as session:
            np.testing.assert_array_equal(session.run(None, {"x": np.tile(x, 2)})[0], -np.maximum(np.tile(x, 2), 0))
            stats = session.stats()["providers"]["kept.py:Kept"]
        assert (stats["nodes_before"], stats["nodes_rewritten"]) == (4, 2)
        assert stats["states_loaded" if loaded else "states_saved"] == 1


def test_the_complete_example_is_the_file_and_short() -> None:
    (shown,) = [text for _, text in BLOCKS if text.startswith("# dense.py\n")]
    assert shown == f"# dense.py\n{DENSE.read_text()}"
    assert len([line for line in shown.splitlines() if line.strip()]) < 60


RANDOM = np.random.default_rng(3)
W, B = RANDOM.standard_normal((5, 7)).astype(F32), RANDOM.standard_normal(7).astype(F32)


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 5), (0, 5), (5,)])
def test_the_complete_example_is_right(shape: tuple[int, ...]) -> None:
    dims = [f"d{i}" for i in range(len(shape) - 1)]
    nodes = [node("MatMul", "x w", "p"), node("Add", "b p", "s"), node("Relu", "s", "y")]
    made = model(nodes, [tensor("x", [*dims, 5])], [tensor("y", [*dims, 7])], {"w": W, "b": B})
    x = RANDOM.standard_normal(shape).astype(F32)
    with InferenceSession(made, providers=[(PROVIDER, {"level": 0})]) as session:
        for _ in range(3):
            (y,) = session.run(None, {"x": x})
            np.testing.assert_allclose(y, np.maximum(x @ W + B, 0), rtol=1e-5, atol=1e-6)
        assert session.stats()["providers"][PROVIDER]["copies"] == 0


DECLINED: dict[str, tuple[list[Any], str]] = {
    "the sum is a result": ([node("MatMul", "x w", "p"), node("Add", "p b", "s"), node("Relu", "s", "y")], "one Relu"),
    "no Add": ([node("MatMul", "x w", "p"), node("Relu", "p", "s"), node("Neg", "s", "y")], "one Add"),
    "fed weights": ([node("MatMul", "x v", "p"), node("Add", "p b", "q"), node("Relu", "q", "y")], "constant matrix"),
    "a wide sum": ([node("MatMul", "x w", "p"), node("Add", "p m", "q"), node("Relu", "q", "y")], "constant row"),
}


def test_the_complete_example_declines_what_it_cannot_do() -> None:
    x, v = RANDOM.standard_normal((3, 5)).astype(F32), RANDOM.standard_normal((5, 7)).astype(F32)
    for name, (nodes, reason) in DECLINED.items():
        made = {one for each in nodes for one in each.output}
        outputs = [tensor(one, None) for one in ("y", "s") if one in made]
        proto = model(nodes, [tensor("x", ["N", 5]), tensor("v", [5, 7])], outputs, {"w": W, "b": B, "m": W[:1] + B})
        with InferenceSession(proto, providers=[PROVIDER, "cpu"]) as session:
            report = session.placement()
            result = session.run(["y"], {"x": x, "v": v})[0]
        assert report.idle_providers == [PROVIDER], name
        (told,) = [one.reason for one in report.declines if one.op == "MatMul"]
        assert reason in told, name
        assert result.shape == (3, 7)


@pytest.mark.parametrize("options", [{"level": 4}, {"levl": 1}])
def test_the_complete_example_refuses_options_that_it_does_not_know(options: dict[str, int]) -> None:
    with pytest.raises(errors.ProviderUnavailableError, match="the one option is level, 0 to 3; got"):
        InferenceSession(chain("Relu"), providers=[(PROVIDER, options)])
