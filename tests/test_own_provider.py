"""The provider of the README, unchanged, and its twin: right wherever its nodes lie in the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import outrider
from outrider.scheduler.errors import (
    ClaimBrokenError,
    KernelError,
    OutriderError,
    ProviderContractError,
    ProviderUnavailableError,
    WorkerDiedError,
)
from tests.build import model, node

pytestmark = pytest.mark.fast

RELU = """
import numpy
from outrider.providers.contract import Provider, Claim, Decline

class MyProvider(Provider):
    def setup(self, context): ...
    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]
    def compile(self, unit):
        return lambda inputs: [numpy.maximum(inputs[0], 0)]
"""
RELU_AND_ABS = """
import numpy
from outrider.providers.contract import Provider, Claim

class MyProvider(Provider):
    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type in ("Relu", "Abs")]
    def compile(self, unit):
        (node,) = unit.nodes
        if node.op_type == "Abs":
            return lambda inputs: [numpy.absolute(inputs[0])]
        return lambda inputs: [numpy.maximum(inputs[0], 0)]
"""
SETUP = "def setup(self, context): ..."
X = np.array([[-2.0, -0.5, 0.0, 1.5]], np.float32)

# name -> (nodes, outputs, what they must be)
GRAPHS = {
    "siblings": (
        [node("Relu", "x", "y"), node("Neg", "x", "n"), node("Relu", "n", "z")],
        {"y": np.maximum(X, 0), "z": np.maximum(-X, 0)},
    ),
    "siblings of one input": (
        [node("Relu", "x", "y"), node("Relu", "x", "z")],
        {"y": np.maximum(X, 0), "z": np.maximum(X, 0)},
    ),
    "chained": ([node("Relu", "x", "r"), node("Relu", "r", "y")], {"y": np.maximum(X, 0)}),
    "chained over another provider": (
        [node("Relu", "x", "r"), node("Neg", "r", "n"), node("Relu", "n", "y"), node("Exp", "y", "z")],
        {"y": 0 * X, "z": np.exp(0 * X)},
    ),
    "diamond": (
        [node("Neg", "x", "n"), node("Relu", "x", "a"), node("Relu", "n", "b"), node("Add", "a b", "y")],
        {"y": np.abs(X)},
    ),
    "diamond with both ends": (
        [
            node("Relu", "x", "r"),
            node("Neg", "r", "a"),
            node("Exp", "r", "b"),
            node("Add", "a b", "s"),
            node("Relu", "s", "y"),
        ],
        {"y": np.maximum(np.exp(np.maximum(X, 0)) - np.maximum(X, 0), 0)},
    ),
    "with Abs": (
        [
            node("Abs", "x", "a"),
            node("Neg", "a", "n"),
            node("Relu", "n", "r"),
            node("Abs", "r", "b"),
            node("Sub", "a b", "y"),
        ],
        {"y": np.abs(X)},
    ),
}


def provider(folder: Path, text: str) -> str:
    path = folder / "my_provider.py"
    path.write_text(text)
    return f"{path}:MyProvider"


@pytest.mark.parametrize("text", [RELU, RELU_AND_ABS], ids=["Relu", "Relu and Abs"])
def test_example_provider_is_right(tmp_path: Path, text: str) -> None:
    mine = provider(tmp_path, text)
    with outrider.Fleet([mine, "cpu"]) as fleet:
        for name, (nodes, outputs) in GRAPHS.items():
            raw = model(nodes, {"x": ["N", 4]}, list(outputs))
            with outrider.InferenceSession(raw, options=outrider.SessionOptions(fleet=fleet)) as session:
                for _ in range(3):
                    got = session.run(None, {"x": X})
                    for key, value, want in zip(outputs, got, outputs.values(), strict=True):
                        np.testing.assert_allclose(value, want, rtol=1e-6, err_msg=f"{name}: {key}")
                placed = {item["op"]: item["provider"] for item in session.placement().to_dict()["nodes"]}
            assert placed["Relu"] == mine
            if "Abs" in placed:
                assert placed["Abs"] == ("cpu" if text is RELU else mine)


# What the callable or the class does wrong -> the error, and whether its worker survives.
WRONG = {
    "raises": ("raise FloatingPointError('no luck')", KernelError),
    "returns nothing": ("return None", ProviderContractError),
    "returns too few": ("return []", ProviderContractError),
    "returns too many": ("return [inputs[0], inputs[0]]", ProviderContractError),
    "returns another dtype": ("return [inputs[0].astype('float64')]", ProviderContractError),
    "returns another rank": ("return [inputs[0].ravel()]", ProviderContractError),
    "returns no array": ("return ['text']", ProviderContractError),
    "exits": ("import os; os._exit(7)", WorkerDiedError),
    "crashes": ("import ctypes; ctypes.string_at(0)", WorkerDiedError),
    "raises SystemExit": ("raise SystemExit(3)", KernelError),
    "writes to its input": ("inputs[0][...] = 1; return [inputs[0]]", KernelError),
}
BREAKS = """
from outrider.providers.contract import Provider, Claim

class MyProvider(Provider):
    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]
    def compile(self, unit):
        def run(inputs):
            if inputs[0].max() > 100:
                {fault}
            return [inputs[0] * (inputs[0] > 0)]
        return run
"""


@pytest.mark.parametrize("fault", WRONG)
def test_a_provider_that_breaks_in_a_run_is_an_error_and_the_next_run_is_right(tmp_path: Path, fault: str) -> None:
    code, kind = WRONG[fault]
    mine = provider(tmp_path, BREAKS.format(fault=code))
    raw = model([node("Relu", "x", "r", name="the_relu"), node("Neg", "r", "y")], {"x": ["N", 4]}, ["y"])
    with outrider.InferenceSession(raw, providers=[mine, "cpu"]) as session:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                session.run(None, {"x": X + 1000})
            assert caught.value.provider == mine
            if kind is KernelError:
                assert caught.value.node == "the_relu"
            elif kind is WorkerDiedError:
                assert caught.value.nodes == ["the_relu"]
                assert caught.value.exit_code == 7 or caught.value.signal == "SIGSEGV"
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], -np.maximum(X, 0))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (RELU.replace(SETUP, SETUP.replace("...", "raise OSError('no device')")), ProviderUnavailableError),
        (RELU.replace("class MyProvider", "class Another"), ProviderUnavailableError),
        (RELU.replace("import numpy", "import numpi"), ProviderUnavailableError),
        (RELU.replace(SETUP, SETUP.replace("...", "import os; os._exit(5)")), ProviderUnavailableError),
        (RELU.replace("return [Claim", "return 5 + [Claim"), OutriderError),
        (RELU.replace("Claim([node])", "Claim([node, node.name])"), OutriderError),
    ],
    ids=["setup raises", "no such class", "missing package", "setup exits", "claim raises", "claims what is no node"],
)
def test_a_provider_that_does_not_start_is_one_clear_error(
    tmp_path: Path, text: str, kind: type[OutriderError]
) -> None:
    mine = provider(tmp_path, text)
    raw = model([node("Relu", "x", "y")], {"x": ["N", 4]}, ["y"])
    with pytest.raises(kind) as caught:
        outrider.InferenceSession(raw, providers=[mine, "cpu"])
    assert mine in str(caught.value)


def test_compile_that_fails_gives_the_node_to_the_next_claimant(tmp_path: Path) -> None:
    mine = provider(tmp_path, RELU.replace("return lambda", "raise MemoryError('too big'); return lambda"))
    raw = model([node("Relu", "x", "y", name="r")], {"x": ["N", 4]}, ["y"])
    with outrider.InferenceSession(raw, providers=[mine, "cpu"]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
        placement = session.placement().to_dict()
    assert [item["provider"] for item in placement["nodes"]] == ["cpu"]
    assert any("too big" in item["reason"] for item in placement["declines"])


def test_compile_that_fails_with_no_other_claimant_is_an_error(tmp_path: Path) -> None:
    mine = provider(tmp_path, RELU.replace("return lambda", "raise MemoryError('too big'); return lambda"))
    raw = model([node("Relu", "x", "y", name="r")], {"x": ["N", 4]}, ["y"])
    with pytest.raises((ClaimBrokenError, OutriderError)) as caught:
        outrider.InferenceSession(raw, providers=[mine])
    assert "too big" in str(caught.value)
    assert "r" in str(caught.value)
