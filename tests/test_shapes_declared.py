"""What symbols of declared shapes stand for in a run."""

from __future__ import annotations

import pytest

from outrider.providers.wire.shapes import concrete, fits, symbols_of

pytestmark = pytest.mark.fast


def test_symbols_are_what_arrived_unless_that_contradicts_itself():
    declared = [("n", 3, None), None, ("n", "m"), ("m",), ()]
    assert symbols_of(declared, [(2, 3, 9), (7,), (2, 5), (5,), None]) == {"n": 2, "m": 5}
    assert symbols_of(declared, [(2, 3, 9), (7,), (4, 5), (5,), ()]) == {"n": None, "m": 5}


def test_a_shape_in_numbers_is_known_wholly_or_not_at_all():
    symbols = {"n": 2, "m": None}
    assert concrete(("n", 3), symbols) == (2, 3)
    assert concrete((), symbols) == ()
    assert [concrete(shape, symbols) for shape in (("m",), ("other",), (None,), None)] == [None] * 4


@pytest.mark.parametrize(
    ("shape", "extents", "right"),
    [
        (("n", 3, None), (2, 3, 9), True), (None, (1, 2), True), (("n",), None, True), ((), (), True),
        (("n",), (3,), False), ((3,), (4,), False), ((3,), (3, 1), False), (("m",), (5,), False),
    ],
)  # fmt: skip
def test_what_arrived_fits_what_is_declared(shape, extents, right):
    assert fits(shape, extents, {"n": 2, "m": None}) == right
