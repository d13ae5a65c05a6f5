"""Models cut at random between workers of `ort`, and between `ort` and `cpu`, beside onnxruntime in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from outrider.providers.wire.onnx_model import is_declarable
from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions
from outrider.scheduler.model import load_model
from outrider.scheduler.placement import plan_nodes
from tests.builders import model, node, tensor
from tests.models import MODELS, feeds, model_path, tolerance
from tests.onnx_parts import agree, direct, in_parts, opened
from tests.test_onnx_parts import CASES, floats, of_two_opsets


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet([ProviderSpec(kind, threads=1) for kind in ("ort", "ort:1", "cpu")]) as made:
        yield made


def run(
    fleet: Fleet, made: Any, providers: Sequence[str], pins: Mapping[str, str], feed: Mapping[str, Any]
) -> tuple[list[Any], int]:
    """The results at level `none`, and how many partitions there are."""
    options = SessionOptions(fleet=fleet, pins=dict(pins), optimization="none")
    with InferenceSession(made, providers=list(providers), options=options) as session:
        return session.run(None, dict(feed)), len(session.placement().to_dict()["partitions"])


def cuts(names: Sequence[str], providers: Sequence[str], seed: int) -> dict[str, str]:
    """Each node's provider: stretches of neighbours go to one after the other."""
    rng = random.Random(seed)
    changes = set(rng.sample(range(1, len(names)), min(len(names) - 1, 3 + len(names) // 16)))
    at = rng.randrange(len(providers))
    pins = {}
    for position, name in enumerate(names):
        at = (at + (position in changes)) % len(providers)
        pins[name] = providers[at]
    return pins


def placeable(made: Any) -> tuple[str, ...]:
    """Names of the nodes that are not made of constants only."""
    loaded = load_model(made)
    loaded.store.close()
    return tuple(
        one.name for one, plan in zip(loaded.graph.nodes, plan_nodes(loaded.graph), strict=True) if not plan.constant
    )


# Real models ----------------------------------------------------------------------------------------------------------
@cache
def known(name: str) -> tuple[tuple[str, ...], dict[str, Any], list[Any]]:
    """Names of the nodes, inputs for one run, and what onnxruntime makes of them as the model is written."""
    path = str(model_path(name))
    return placeable(path), feeds(name), direct(onnx.load(path), feeds(name))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_real_models_between_ort_and_cpu(fleet: Fleet, name: str, seed: int) -> None:
    names, feed, expected = known(name)
    providers = ["ort", "cpu"]
    results, partitions = run(fleet, str(model_path(name)), providers, cuts(names, providers, seed), feed)
    assert partitions > 1
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        if other.dtype.kind == "f":
            assert np.abs(one.astype(float) - other).max() <= tolerance(name) * np.abs(other).max()
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_real_models_between_two_of_a_kind_are_bit_for_bit_one(fleet: Fleet, name: str) -> None:
    names, feed, expected = known(name)
    providers = ["ort", "ort:1"]
    results, partitions = run(fleet, str(model_path(name)), providers, cuts(names, providers, 0), feed)
    assert partitions > 1
    agree(results, expected)


# Random graphs --------------------------------------------------------------------------------------------------------
def random_model(seed: int) -> onnx.ModelProto:
    """A graph over values of shape [4, 8] whose operators round alike everywhere: bodies that capture, weights large
    and small, in the graph and in bodies, constant nodes, several outputs, equal names and none."""
    rng = random.Random(seed)
    constants = {
        "small": np.array([0.5], np.float32),
        "large": np.linspace(-2, 2, 512, dtype=np.float32).reshape(64, 8),
    }
    values, nodes = ["x"], [node("Slice", "large zero four", "rows")]
    constants |= {"zero": np.array([0]), "four": np.array([4]), "halves": np.array([4, 4])}
    values.append("rows")
    for i in range(rng.randint(6, 24)):
        kind = rng.choice(["unary", "binary", "split", "if", "loop", "constant", "clip"])
        a, b = rng.choice(values[-6:]), rng.choice([*values, "small"])
        name = rng.choice(["", "twin", f"n{i}"])
        if kind == "unary":
            nodes.append(node(rng.choice(["Neg", "Abs", "Relu", "Identity"]), a, f"v{i}", name))
        elif kind == "binary":
            nodes.append(node(rng.choice(["Add", "Sub", "Max", "Mul"]), f"{a} {b}", f"v{i}", name))
        elif kind == "clip":
            nodes.append(node("Clip", f"{a} - one", f"v{i}", name))
        elif kind == "split":
            nodes.append(node("Split", f"{a} halves", f"l{i} r{i}", name, axis=1))
            nodes.append(node("Concat", f"r{i} l{i}", f"v{i}", name, axis=1))
        elif kind == "constant":
            array = np.full((rng.choice([1, 64]), 8), rng.randint(-3, 3), np.float32)
            nodes.append(helper.make_node("Constant", [], [f"k{i}"], value=numpy_helper.from_array(array)))
            nodes.append(node("Slice", f"k{i} zero four", f"s{i}"))
            nodes.append(node("Add", f"{a} s{i}", f"v{i}", name))
        elif kind == "if":
            nodes += conditional(rng, i, a, b, values)
        else:
            nodes.append(loop(rng, i, a, b))
        values.append(f"v{i}")
    constants |= {"one": np.array(1, np.float32), "never": np.array([1e30], np.float32), "times": np.array(2)}
    outputs = [tensor(name, None) for name in dict.fromkeys([*rng.sample(values, 2), values[-1]])]
    return model(nodes, [tensor("x", [4, 8])], outputs, constants, opset=17)


def weight(name: str, rng: random.Random) -> onnx.TensorProto:
    """[4, 8] or [1, 8] in large: [64, 8]; only the first 4 rows are read."""
    return numpy_helper.from_array(np.full((64, 8), rng.randint(-2, 2), np.float32), name)


def conditional(rng: random.Random, i: int, a: str, b: str, values: Sequence[str]) -> list[onnx.NodeProto]:
    """Takes the branch that the data say; both capture, one has a large weight, one may hold another If."""
    inner = rng.choice(values)
    then = helper.make_graph(
        [node("Slice", f"w{i} zero four", f"ws{i}"), node("Mul", f"{a} ws{i}", f"t{i}")],
        f"then{i}", [], [tensor(f"t{i}", None)], [weight(f"w{i}", rng)],
    )  # fmt: skip
    deep = helper.make_graph([node("Add", f"{inner} {b}", f"d{i}", "twin")], f"deep{i}", [], [tensor(f"d{i}", None)])
    other = helper.make_graph([node("Sub", f"{inner} {a}", f"o{i}")], f"other{i}", [], [tensor(f"o{i}", None)])
    nested = helper.make_graph(
        [
            node("Identity", a, f"e{i}"),
            helper.make_node("If", [f"c{i}"], [f"q{i}"], then_branch=deep, else_branch=other),
            node("Max", f"e{i} q{i}", f"p{i}"),
        ],
        f"else{i}", [], [tensor(f"p{i}", None)],
    )  # fmt: skip
    return [
        node("ReduceMax", inner, f"m{i}", keepdims=0),
        node("Less", f"m{i} one", f"c{i}"),
        helper.make_node("If", [f"c{i}"], [f"v{i}"], then_branch=then, else_branch=nested),
    ]


def loop(rng: random.Random, i: int, a: str, b: str) -> onnx.NodeProto:
    """Two rounds that add what they capture."""
    body = helper.make_graph(
        [
            node("Identity", f"go{i}", f"on{i}"),
            node("Slice", f"lw{i} zero four", f"ls{i}"),
            node("Add", f"state{i} {b}", f"sum{i}"),
            node("Max", f"sum{i} ls{i}", f"next{i}"),
        ],
        f"body{i}",
        [tensor(f"round{i}", [], TensorProto.INT64), tensor(f"go{i}", [], TensorProto.BOOL), tensor(f"state{i}", None)],
        [tensor(f"on{i}", [], TensorProto.BOOL), tensor(f"next{i}", None)],
        [weight(f"lw{i}", rng)],
    )  # fmt: skip
    return helper.make_node("Loop", ["times", "", a], [f"v{i}"], body=body)


def random_feed(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).integers(-2, 3, (4, 8)).astype(np.float32) / 2}


@pytest.mark.parametrize("seed", range(100, 130))
def test_random_graphs_in_parts(seed: int) -> None:
    """In this process, where more of them can be tried."""
    made, feed = random_model(seed), random_feed(seed)
    rng = random.Random(seed)
    with opened(made) as (graph, shipment):
        agree(in_parts(graph, shipment, feed, lambda one: rng.randint(0, 2)), direct(made, feed))


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_between_ort_and_cpu(fleet: Fleet, seed: int) -> None:
    made, feed = random_model(seed), random_feed(seed)
    providers = ["ort", "cpu", "ort:1"]
    results, _ = run(fleet, made, providers, cuts(placeable(made), providers, seed), feed)
    agree(results, direct(made, feed))


# What can be in a model -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("providers", [["ort"], ["ort", "ort:1"]], ids=["one worker", "two in turn"])
def test_whatever_is_in_a_model_crosses_workers(fleet: Fleet, name: str, providers: list[str]) -> None:
    made, feed = CASES[name]()
    loaded = load_model(made)
    loaded.store.close()
    owner: dict[str, str] = {}
    pins = {}
    for i, one in enumerate(loaded.graph.nodes):
        # What a value of unknown type is cannot be said to a worker: it stays where it was made.
        untyped = [owner[value.name] for value in one.inputs if value.name in owner and not is_declarable(value)]
        pins[one.name] = (untyped or [providers[i % len(providers)]])[0]
        owner.update((value.name, pins[one.name]) for value in one.outputs)
    results, _ = run(fleet, made, providers, pins, feed)
    agree(results, direct(made, feed))


def test_what_onnxruntime_would_misread_goes_to_another_provider(fleet: Fleet) -> None:
    """Nodes inlined from a function of another opset, where that means another thing; onnxruntime refuses the model."""
    made, feed = of_two_opsets(), {"x": floats(2, 3, 4), "c": np.array(True)}
    options = SessionOptions(fleet=fleet, optimization="none")
    with InferenceSession(made, providers=["ort", "cpu"], options=options) as session:
        (y,) = session.run(None, feed)
        report = session.placement().to_dict()
    np.testing.assert_allclose(y, ReferenceEvaluator(made).run(None, feed)[0], rtol=1e-6)
    owner = {one["name"]: one["provider"] for one in report["nodes"]}
    assert {name for name, provider in owner.items() if provider == "cpu"} == {"#0/#0", "#0/#1", "#1"}
    assert all("opset 11" in one["reason"] for one in report["declines"] if one["provider"] == "ort")
