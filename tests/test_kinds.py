"""Real models of other kinds, in both implementations of the kernels, against onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import outrider
from tests.kinds import KINDS, kind_feeds, kind_path
from tests.oracle import assert_agree, run_ort


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "numpy"])
def fleet(request: pytest.FixtureRequest) -> Iterator[outrider.Fleet]:
    """One worker with one thread."""
    with outrider.Fleet([outrider.ProviderSpec("cpu", options={"compiled": request.param}, threads=1)]) as made:
        yield made


@pytest.mark.parametrize("name", KINDS)
def test_it_agrees_with_onnxruntime_and_kernels_of_ours_serve_it_all(fleet: outrider.Fleet, name: str) -> None:
    path = str(kind_path(name))
    with outrider.InferenceSession(path, options=outrider.SessionOptions(fleet=fleet)) as session:
        assert [node["name"] for node in session.placement().to_dict()["nodes"] if node["reference"]] == []
        names = [output.name for output in session.get_outputs()]
        for seed in range(3):
            inputs = kind_feeds(name, seed)
            got = dict(zip(names, session.run(None, inputs), strict=True))
            assert_agree(got, run_ort(path, inputs), KINDS[name].tolerance)
