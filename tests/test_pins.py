"""Pins: exact names before patterns, first match in the user's order, and what is an error."""

import fnmatch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.pins import PinNotFoundError, UnknownProviderError, resolve

pytestmark = pytest.mark.fast

NAMES = [
    ("enc/conv", False),
    ("enc/relu", False),
    ("enc/scale", True),
    ("dec/conv", False),
    ("x[0]", False),
    ("x0", False),
]
PROVIDERS = ["cuda:0", "cpu"]


def test_an_exact_name_goes_before_an_earlier_pattern():
    found = resolve({"enc/*": "cuda:0", "enc/relu": "cpu"}, NAMES, PROVIDERS)
    assert found.assignment == {0: 0, 1: 1}


def test_the_first_pattern_in_the_users_order_counts():
    assert resolve({"*conv": "cpu", "enc/*": "cuda:0"}, NAMES, PROVIDERS).assignment == {0: 1, 3: 1, 1: 0}
    assert resolve({"enc/*": "cuda:0", "*conv": "cpu"}, NAMES, PROVIDERS).assignment == {0: 0, 1: 0, 3: 1}


def test_a_name_with_brackets_is_that_node_and_else_a_pattern():
    assert resolve({"x[0]": "cpu"}, NAMES, PROVIDERS).assignment == {4: 1}
    without = [entry for entry in NAMES if entry[0] != "x[0]"]
    assert resolve({"x[0]": "cpu"}, without, PROVIDERS).assignment == {4: 1}  # now a pattern, which matches x0
    assert resolve({"x[[]*": "cpu"}, NAMES, PROVIDERS).assignment == {4: 1}


def test_patterns_heed_case():
    with pytest.raises(PinNotFoundError):
        resolve({"ENC/*": "cpu"}, NAMES, PROVIDERS)


def test_every_node_of_one_name_is_meant():
    assert resolve({"a": "cpu"}, [("a", False), ("b", False), ("a", False)], PROVIDERS).assignment == {0: 1, 2: 1}


def test_a_pin_that_matches_constants_only_is_reported_and_does_nothing():
    found = resolve({"enc/sc*": "cpu"}, NAMES, PROVIDERS)
    assert found.assignment == {}
    assert found.constant == [("enc/sc*", "enc/scale")]


def test_a_pattern_over_constants_and_others_moves_the_others():
    found = resolve({"enc/*": "cpu"}, NAMES, PROVIDERS)
    assert found.assignment == {0: 1, 1: 1}
    assert found.constant == []


def test_a_key_that_matches_nothing_names_what_is_near():
    with pytest.raises(PinNotFoundError, match="enc/conv") as caught:
        resolve({"enc/convv": "cpu"}, NAMES, PROVIDERS)
    assert caught.value.pin == "enc/convv"
    assert "enc/conv" in caught.value.suggestions
    assert isinstance(caught.value, ValueError)


def test_a_bracket_in_a_pattern_that_matches_nothing_tells_the_escape():
    with pytest.raises(PinNotFoundError, match=r"write '\[\[\]'"):
        resolve({"y[0]": "cpu"}, NAMES, PROVIDERS)


def test_an_unknown_provider_names_the_known_ones():
    with pytest.raises(UnknownProviderError, match="cuda:0, cpu") as caught:
        resolve({"enc/conv": "cuda"}, NAMES, PROVIDERS)
    assert (caught.value.provider, caught.value.known) == ("cuda", ("cuda:0", "cpu"))


def test_a_pattern_whose_nodes_all_have_exact_pins_is_no_error():
    assert resolve({"x0": "cpu", "x?": "cuda:0"}, NAMES, PROVIDERS).assignment == {5: 1}


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    names=st.lists(st.tuples(st.text("ab[]*?/", min_size=1, max_size=4), st.booleans()), max_size=8),
    keys=st.lists(st.text("ab[]*?/", min_size=1, max_size=4), max_size=4, unique=True),
)
def test_the_rule_as_it_is_written(names, keys):
    pins = {key: PROVIDERS[i % 2] for i, key in enumerate(keys)}
    plain = [name for name, _ in names]
    unmatched = [k for k in keys if k not in plain and not any(fnmatch.fnmatchcase(n, k) for n in plain)]
    if unmatched:
        with pytest.raises(PinNotFoundError) as caught:
            resolve(pins, names, PROVIDERS)
        assert caught.value.pin in unmatched
        return
    found = resolve(pins, names, PROVIDERS)
    for position, (name, constant) in enumerate(names):
        exact = [k for k in keys if k == name]
        pattern = [k for k in keys if k not in plain and fnmatch.fnmatchcase(name, k)]
        first = (exact + pattern)[:1]
        expected = PROVIDERS.index(pins[first[0]]) if first and not constant else None
        assert found.assignment.get(position) == expected
