"""The null provider: what it claims, the places it asks for, and that it writes nothing."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from outrider.providers.contract import Claim, Context, Decline, ProviderContractError, ProviderUnavailableError
from outrider.providers.null import NullProvider
from tests.program_harness import graph_of, model, offers, ready, unit_of

pytestmark = pytest.mark.fast


def test_places_follow_the_signature_and_stay_unwritten() -> None:
    proto = model("""agraph (float[N, 3] x, int64[M] i) => (float[N, 3] y, bool[M] z) {
        a = Neg(x)  y = Relu(a)  z = Equal(i, i) }""")
    provider = ready(NullProvider())
    with graph_of(proto) as graph:
        assert all(isinstance(offer, Claim) for offer in provider.claim(graph))
        program = provider.compile(unit_of(graph))
    asked = {}

    def place(i: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        asked[i] = (dtype, shape)
        return np.full(shape, 1, dtype)

    inputs = [np.ones((5, 3), np.float32), np.ones(2, np.int64)]
    run = program.bind(inputs, place)
    assert asked == {0: ("float32", (5, 3)), 1: ("bool", (2,))}
    assert list(run(inputs)) == [None, None]
    assert inputs[0].all()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("agraph (float[N] x) => (int64[1, K] y) { y = NonZero(x) }", "dimension"),
        ("agraph (string[N] x) => (string[N] y) { y = Identity(x) }", "no fixed size"),
        ("agraph (float[N] x) => (seq(float[N]) y) { y = SequenceConstruct(x) }", "no fixed size"),
        ("agraph (float[N] x) => (float y) { y = nobody.Does(x) }", "rank"),
        ("agraph (float x, int64[K] s) => (float y) { y = Reshape(x, s) }", "rank"),
    ],
)
def test_what_has_no_known_size_is_declined(text: str, reason: str) -> None:
    (answer,) = offers(model(text, nobody=1), NullProvider())
    assert isinstance(answer, Decline)
    assert reason in answer.reason


def test_a_symbol_of_two_extents_breaks_the_contract() -> None:
    provider = ready(NullProvider())
    with graph_of(model("agraph (float[N] x, float[N] z) => (float[N] y) { y = Add(x, z) }")) as graph:
        program = provider.compile(unit_of(graph))
    with pytest.raises(ProviderContractError, match=r"cannot tell the shape \('N',\) of 'y'"):
        program.bind([np.ones(2, np.float32), np.ones(3, np.float32)], lambda i, dtype, shape: np.empty(shape, dtype))


def test_options_are_refused() -> None:
    with pytest.raises(ProviderUnavailableError, match="no option speed"):
        NullProvider().setup(Context({"speed": 1}, 0, 1, logging.getLogger()))
