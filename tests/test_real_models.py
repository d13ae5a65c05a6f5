"""Twelve trained models: one cpu worker against onnxruntime, several against one, and checks with a meaning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import outrider
from outrider.scheduler.errors import PinDeclinedError, UnsupportedOpError
from tests.models import MODELS, feeds, model_path, tolerance, tone
from tests.oracle import assert_agree, run_ort

PICKY = f"{Path(__file__).with_name('own_providers.py')}:Picky"
CPUS = ("cpu", "cpu:1", "cpu:2")
CUT = ("basic-pitch", "ppocr-cls", "silero-16k", "silero-sequence")
SILERO = [name for name, model in MODELS.items() if model.family == "silero"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[outrider.Fleet]:
    """Three workers with one thread each: BLAS gives other bits on two."""
    with outrider.Fleet([outrider.ProviderSpec(name, threads=1) for name in CPUS]) as made:
        yield made


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[outrider.Fleet]:
    """A worker that computes in NumPy."""
    with outrider.Fleet([outrider.ProviderSpec("cpu", options={"compiled": False}, threads=1)]) as made:
        yield made


@pytest.fixture(scope="module")
def nobody() -> Iterator[outrider.Fleet]:
    """A worker whose provider claims nothing of these models, and one that claims the rest."""
    with outrider.Fleet([(PICKY, {"operator": "Nothing"}), "cpu"]) as made:
        yield made


def open_model(
    fleet: outrider.Fleet, name: str, providers: tuple[str, ...] = ("cpu",), **options: object
) -> outrider.InferenceSession:
    return outrider.InferenceSession(
        str(model_path(name)), providers=list(providers), options=outrider.SessionOptions(fleet=fleet, **options)
    )


def run_all(session: outrider.InferenceSession, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


def full_names(graph: onnx.GraphProto) -> list[str]:
    """The names that pins, reports and errors use, in the order of the file: `#17` for an unnamed node, and a name that
    was taken already gets `~2`, `~3`.
    """
    seen: Counter[str] = Counter()
    names = []
    for i, node in enumerate(graph.node):
        name = node.name or f"#{i}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}~{seen[name]}")
    return names


def names_that_run(graph: onnx.GraphProto) -> set[str]:
    """The same without nodes that are made of constants only."""
    constant = {item.name for item in graph.initializer} - {item.name for item in graph.input}
    found = set()
    for name, node in zip(full_names(graph), graph.node, strict=True):
        if node.op_type != "If" and all(value in constant for value in node.input if value):
            constant.update(node.output)
        else:
            found.add(name)
    return found


def agrees_with_onnxruntime(fleet: outrider.Fleet, name: str) -> None:
    with open_model(fleet, name) as session:
        nodes = session.placement().to_dict()["nodes"]
        for seed in range(3):  # shapes change with the seed where the model allows it
            inputs = feeds(name, seed)
            assert_agree(run_all(session, inputs), run_ort(model_path(name), inputs), tolerance(name))
    assert [node["name"] for node in nodes if node["reference"]] == []


@pytest.mark.fast
@pytest.mark.parametrize("name", MODELS)
def test_one_worker_agrees_with_onnxruntime_and_kernels_of_ours_serve_it_all(fleet: outrider.Fleet, name: str) -> None:
    agrees_with_onnxruntime(fleet, name)


@pytest.mark.parametrize("name", MODELS)
def test_so_it_does_without_the_compiled_kernels(uncompiled: outrider.Fleet, name: str) -> None:
    agrees_with_onnxruntime(uncompiled, name)


@pytest.mark.parametrize("name", MODELS)
def test_names_in_the_report_are_the_original_ones(fleet: outrider.Fleet, name: str) -> None:
    graph = onnx.load(model_path(name), load_external_data=False).graph
    original = set(zip(full_names(graph), (node.op_type for node in graph.node), strict=True))
    runs = names_that_run(graph)
    with open_model(fleet, name) as session:
        reported = [(node["name"], node["op"]) for node in session.placement().to_dict()["nodes"]]
        inputs = [value.name for value in session.get_inputs()]
        outputs = [value.name for value in session.get_outputs()]
    top = [item for item in reported if item in original]
    bodies = [node for node, op in reported if (node, op) not in original]
    assert len(top) == len(set(top))
    assert runs <= {node for node, _ in top}
    # The nodes of a body carry the name of the node that holds it.
    assert all(node.split("/then/")[0].split("/else/")[0] in runs for node in bodies)
    given = {item.name for item in graph.initializer}
    assert inputs == [item.name for item in graph.input if item.name not in given]
    assert outputs == [item.name for item in graph.output]


@pytest.mark.parametrize("name", MODELS)
def test_names_in_errors_are_the_original_ones(nobody: outrider.Fleet, name: str) -> None:
    graph = onnx.load(model_path(name), load_external_data=False).graph
    original, runs = full_names(graph), names_that_run(graph)
    with pytest.raises(UnsupportedOpError) as unclaimed:
        open_model(nobody, name, (PICKY,))
    nodes = unclaimed.value.nodes
    assert runs <= set(nodes) <= set(original)
    assert nodes == [one for one in original if one in set(nodes)]  # in graph order
    assert unclaimed.value.node == nodes[0]
    named = {one for group in unclaimed.value.groups for one in group["examples"]}
    assert named and named <= set(nodes)
    last = [one for one in original if one in runs][-1]
    with pytest.raises(PinDeclinedError) as pinned:
        open_model(nobody, name, (PICKY, "cpu"), pins={last: PICKY})
    assert pinned.value.node == pinned.value.pin == last
    assert repr(last) in str(pinned.value)


@pytest.mark.parametrize("optimization", ["none", "basic"])
@pytest.mark.parametrize("name", CUT)
def test_random_cuts_over_three_workers_are_bit_equal(fleet: outrider.Fleet, name: str, optimization: str) -> None:
    inputs = feeds(name, 0)
    graph = onnx.load(model_path(name), load_external_data=False).graph
    nodes = full_names(graph)
    runs = names_that_run(graph)
    with open_model(fleet, name, optimization=optimization) as session:
        expected = run_all(session, inputs)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        # From a few long stretches to every node by itself.
        stretch = int(rng.choice([1, 3, 12, 60]))
        owners = [str(rng.choice(CPUS)) for _ in range(len(nodes) // stretch + 1)]
        pins = {node: owners[i // stretch] for i, node in enumerate(nodes)}
        with open_model(fleet, name, CPUS, optimization=optimization, pins=pins) as session:
            placed = {node["name"]: node["provider"] for node in session.placement().to_dict()["nodes"]}
            futures = [session.run_async(None, inputs) for _ in range(5)]  # more than there are slots
            results = [dict(zip(expected, future.result(), strict=True)) for future in futures]
        assert {node: placed[node] for node in runs} == {node: pins[node] for node in runs}
        for got in results:
            for key, want in expected.items():
                assert got[key].dtype == want.dtype
                assert got[key].tobytes() == want.tobytes(), (seed, stretch, key)


@pytest.mark.parametrize("strategy", ["cost", "pipeline", "replicate"])
@pytest.mark.parametrize("name", MODELS)
def test_strategies_are_bit_equal_to_one_worker(fleet: outrider.Fleet, name: str, strategy: str) -> None:
    """With several runs in flight; before and after the model was placed anew for what partitions took."""
    inputs = feeds(name, 0)
    with open_model(fleet, name, optimization="basic") as session:
        expected = [item.tobytes() for item in session.run(None, inputs)]
    options = {"optimization": "basic", "strategy": strategy, "max_in_flight": 4}
    with open_model(fleet, name, CPUS, **options) as session:
        for _ in range(2):
            futures = [session.run_async(None, inputs) for _ in range(6)]
            assert all([item.tobytes() for item in future.result()] == expected for future in futures)
            owners = {one.provider for one in session.placement().partitions}
            assert owners == ({"cpu"} if strategy == "cost" else set(CPUS))
            session.warmup({key: value.shape for key, value in inputs.items()})


@pytest.mark.fast
def test_a_tone_of_440_hz_is_key_48_of_the_piano_roll(fleet: outrider.Fleet) -> None:
    audio = tone(440.0, 43844, 22050)[None, :, None]
    with open_model(fleet, "basic-pitch", CPUS) as session:
        (notes,) = session.run(["StatefulPartitionedCall:1"], {"serving_default_input_2:0": audio})
    loudness = notes[0].mean(axis=0)
    assert loudness.argmax() == 48  # A4, counted from A0 on a piano of 88 keys
    assert loudness[48] > 0.5 > 2 * np.delete(loudness, 48).max()


@pytest.mark.fast
@pytest.mark.parametrize("name", SILERO)
def test_noise_is_no_speech(fleet: outrider.Fleet, name: str) -> None:
    rng = np.random.default_rng(0)
    with open_model(fleet, name) as session:
        given = [value.name for value in session.get_inputs()]
        state = {key: np.zeros_like(value) for key, value in feeds(name).items() if key in ("state", "h", "c")}
        speech = []
        for _ in range(10):  # the state goes from chunk to chunk
            inputs = {"input": (0.05 * rng.standard_normal((1, 576))).astype(np.float32), **state}
            if "sr" in given:
                inputs["sr"] = np.array(16000, np.int64)
            probability, *after = session.run(None, inputs)
            state = dict(zip(state, after, strict=True))
            speech.append(float(probability.ravel()[0]))
    assert max(speech) < 0.1
