"""Real models of other kinds, in both implementations of the kernels, against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import onnx
import pytest

import outrider
from tests.kinds import KINDS, kind_feeds, kind_path
from tests.models import Feeds, feeds, model_path
from tests.networks import behind, quantised, quantised_anew
from tests.oracle import assert_agree, run_ort

QUANTISED = ("ddddocr-int8", "kokoro")
FRAME = 600  # samples that kokoro's numbers of frames stand for
# Angles of numbers near zero in kokoro: they go either way.
ANGLES = "/decoder/decoder/generator/Concat_3_output_0"


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "numpy"])
def fleet(request: pytest.FixtureRequest) -> Iterator[outrider.Fleet]:
    """One worker with one thread."""
    with outrider.Fleet([outrider.ProviderSpec("cpu", options={"compiled": request.param}, threads=1)]) as made:
        yield made


@pytest.mark.parametrize("name", [name for name in KINDS if name != "kokoro"])
def test_it_agrees_with_onnxruntime_and_kernels_of_ours_serve_it_all(fleet: outrider.Fleet, name: str) -> None:
    agrees(fleet, str(kind_path(name)), lambda seed: kind_feeds(name, seed), KINDS[name].tolerance)


def test_speech_of_a_quantised_synthesiser_is_as_long_and_as_loud(fleet: outrider.Fleet) -> None:
    # Its samples differ, in onnxruntime too when the voice changes by 2e-7: a quantised network tells a sine's phase.
    with outrider.InferenceSession(str(kind_path("kokoro")), options=outrider.SessionOptions(fleet=fleet)) as session:
        assert [node["name"] for node in session.placement().to_dict()["nodes"] if node["reference"]] == []
        inputs = kind_feeds("kokoro")
        (got,) = session.run(None, inputs)
    expected = run_ort(kind_path("kokoro"), inputs)["audio"]
    assert abs(got.size - expected.size) <= 2 * FRAME
    count = min(got.size, expected.size) // (3 * FRAME) * 3 * FRAME
    loudness = [np.sqrt(np.square(sound[:count]).reshape(-1, 3 * FRAME).mean(1)) for sound in (got, expected)]
    assert np.corrcoef(loudness[0], loudness[1])[0, 1] > 0.95


@pytest.mark.parametrize("name", ["ppocr-cls", "magika"])
def test_so_does_a_model_with_pairs_of_quantizelinear_and_dequantizelinear(fleet: outrider.Fleet, name: str) -> None:
    # A value at the edge between two of 256 steps goes either way.
    agrees(fleet, with_pairs(name), lambda seed: feeds(name, seed), 1e-2)


@pytest.mark.parametrize("name", QUANTISED)
def test_between_its_quantising_nodes_it_agrees_closely(fleet: outrider.Fleet, name: str) -> None:
    made = onnx.load(kind_path(name))
    model, inputs = quantised_anew(made, kind_feeds(name))
    with outrider.InferenceSession(model, options=outrider.SessionOptions(fleet=fleet)) as session:
        names = [output.name for output in session.get_outputs()]
        got = dict(zip(names, session.run(None, inputs), strict=True))
    expected = run_ort(model, inputs)
    for results in (got, expected):
        angles = results.pop(ANGLES, None)
        assert angles is None or np.isfinite(angles).all()
    # A DynamicQuantizeLSTM quantises its state in each step: there values go either way, too.
    loose = behind(onnx.load_from_string(model), "DynamicQuantizeLSTM")
    for some, bound in ((loose & set(got), 3e-2), (set(got) - loose, 1e-4)):
        assert some
        assert_agree({k: got[k] for k in got if k in some}, {k: expected[k] for k in got if k in some}, bound)


@lru_cache
def with_pairs(name: str) -> bytes:
    return quantised(onnx.load(model_path(name)), "qdq", [feeds(name, seed) for seed in range(3)])


def agrees(fleet: outrider.Fleet, model: str | bytes, make: Callable[[int], Feeds], tolerance: float) -> None:
    with outrider.InferenceSession(model, options=outrider.SessionOptions(fleet=fleet)) as session:
        assert [node["name"] for node in session.placement().to_dict()["nodes"] if node["reference"]] == []
        names = [output.name for output in session.get_outputs()]
        for seed in range(3):  # shapes change with the seed where the model allows it
            inputs = make(seed)
            got = dict(zip(names, session.run(None, inputs), strict=True))
            assert_agree(got, run_ort(model, inputs), tolerance)
