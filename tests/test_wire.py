"""Messages and values that cross processes: what was packed comes back equal, and nothing malformed gets through."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.providers.wire import messages, values
from outrider.providers.wire.errors import ProtocolMismatchError, WireError
from outrider.providers.wire.failures import error_from_plain, error_to_plain
from outrider.scheduler import errors

pytestmark = pytest.mark.fast
quick = settings(deadline=None, derandomize=True, max_examples=60)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's declared type."""
    if hint is Any:
        return PLAIN
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return st.lists(of_type(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    if arguments:
        return st.one_of([of_type(one) for one in arguments])
    return {int: st.integers(0, 1 << 60), str: st.text(max_size=8), bool: st.booleans(), type(None): st.none()}[hint]


@st.composite
def any_message(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(sorted(messages.CATALOGUE.values(), key=lambda one: one.__name__)))
    hints = typing.get_type_hints(kind)
    return kind(**{name: draw(of_type(hint)) for name, hint in hints.items()})


@quick
@given(any_message())
def test_messages_come_back_equal(message: Any) -> None:
    assert messages.unpack(messages.pack(message)) == message


@quick
@given(any_message(), st.data())
def test_a_message_with_a_wrong_missing_or_surplus_field_is_refused(message: Any, data: st.DataObject) -> None:
    body = msgpack.unpackb(messages.pack(message), strict_map_key=False)
    names = [field.name for field in dataclasses.fields(message)]
    change = data.draw(st.sampled_from(["wrong", "missing"] if names else ["surplus"]) | st.just("surplus"))
    if change == "surplus":
        body["what_is_this"] = 1
    elif change == "missing":
        del body[data.draw(st.sampled_from(names))]
    else:
        hints = typing.get_type_hints(type(message))
        typed = [name for name in names if hints[name] is not Any]
        body[data.draw(st.sampled_from(typed))] = 1.5  # no field is a float
    with pytest.raises(WireError) as caught:
        messages.unpack(msgpack.packb(body))
    assert caught.value.reason in ("wrong type", "missing field", "surplus field")


@quick
@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises((WireError, ProtocolMismatchError)):
        messages.unpack(body)


@quick
@given(any_message(), st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_message_is_an_error_or_a_message_never_a_crash(message: Any, damage: list[tuple[int, int]]) -> None:
    body = bytearray(messages.pack(message))
    for place, value in damage:
        body[place % len(body)] = value
    with contextlib.suppress(WireError, ProtocolMismatchError):
        assert type(messages.unpack(bytes(body))).__name__ in messages.CATALOGUE


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\x91\x01\x01",  # a list as the key of a map
        msgpack.packb({1: 2, "a": 3, "type": "Stop", "protocol": messages.PROTOCOL}),  # keys that have no order
        b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_bytes_that_are_hard_to_refuse(body: bytes) -> None:
    with pytest.raises(WireError):
        messages.unpack(body)


def test_another_protocol_is_refused_with_both_versions() -> None:
    body = msgpack.unpackb(messages.pack(messages.Stop()))
    body["protocol"] = 7
    with pytest.raises(ProtocolMismatchError) as caught:
        messages.unpack(msgpack.packb(body))
    assert (caught.value.ours, caught.value.theirs) == (messages.PROTOCOL, 7)


def test_a_true_is_not_an_integer() -> None:
    with pytest.raises(WireError, match="incarnation"):
        messages.pack(messages.StartFailed(True, "", ""))


PLAIN_DTYPES = [np.float32, np.float64, np.int64, np.uint8, np.bool_, np.complex64, np.float16]
DTYPES = [*PLAIN_DTYPES, ml_dtypes.bfloat16, ml_dtypes.int4]
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.integers(0, 9),
)
STRINGS = st.builds(
    lambda texts, shape: np.array((texts * 6)[:6], dtype=object).reshape(shape),
    st.lists(st.text(max_size=6), min_size=1, max_size=6),
    st.sampled_from([(6,), (2, 3), (1, 6, 1)]),
)
VALUES = st.recursive(
    st.none() | ARRAYS | STRINGS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(-5, 5), inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        if a.dtype == object:
            return a.shape == b.shape and a.tolist() == b.tolist()
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a is None and b is None


@quick
@given(VALUES)
def test_values_come_back_equal_and_own_their_memory(value: Any) -> None:
    chunks = values.encode(value)
    body = bytearray(b"".join(chunks))
    assert values.size(chunks) == len(body)
    again = values.decode(memoryview(body))
    body[:] = bytes(len(body))  # what was decoded must not look at the bytes any more
    assert same(value, again)


@quick
@given(VALUES, st.data())
def test_a_damaged_value_is_an_error_or_a_value_never_a_crash(value: Any, data: st.DataObject) -> None:
    body = bytearray(b"".join(values.encode(value)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    with contextlib.suppress(WireError):
        values.decode(memoryview(body)[:cut])


def encoded(header: Any, data: bytes = b"") -> memoryview:
    packed = msgpack.packb(header)
    lead = len(packed).to_bytes(8, "little") + packed
    return memoryview(lead + b"\0" * (-len(lead) % 64) + data)


def nested(depth: int) -> dict[str, Any]:
    header: dict[str, Any] = {"kind": "none"}
    for _ in range(depth):
        header = {"kind": "list", "items": [header]}
    return header


@pytest.mark.parametrize(
    "value",
    [
        encoded({"kind": "tensor", "dtype": "float64", "shape": [1 << 40], "offset": 0, "nbytes": 8}, bytes(8)),
        encoded({"kind": "tensor", "dtype": "float64", "shape": [1 << 63], "offset": 0, "nbytes": 8}, bytes(8)),
        encoded({"kind": "tensor", "dtype": "float64", "shape": [-1], "offset": 0, "nbytes": 8}, bytes(8)),
        encoded({"kind": "tensor", "dtype": "float64", "shape": [1], "offset": -8, "nbytes": 8}, bytes(8)),
        encoded({"kind": "tensor", "dtype": "string", "shape": [1], "offset": 0, "nbytes": 8}, bytes(8)),
        encoded({"kind": "tensor", "dtype": "undefined", "shape": [1], "offset": 0, "nbytes": 8}, bytes(8)),
        encoded({"kind": "tensor", "dtype": ["a"], "shape": [1], "offset": 0, "nbytes": 8}, bytes(8)),
        encoded({"kind": "string", "shape": [1 << 40], "offset": 0, "nbytes": 3}, msgpack.packb(["a"])),
        encoded({"kind": "string", "shape": [2], "offset": 0, "nbytes": 3}, msgpack.packb(["a"])),
        encoded({"kind": "string", "shape": [1], "offset": 0, "nbytes": 2}, msgpack.packb([7])),
        encoded({"kind": "map", "keys": [[1]], "values": [{"kind": "none"}]}),
        encoded({"kind": "bribe", "shape": [], "offset": 0, "nbytes": 0}),
        encoded(7),
        encoded(nested(values.MAX_DEPTH + 1)),
        memoryview(b"\xff" * 64),
        memoryview(b""),
    ],
)
def test_an_encoded_value_asks_for_no_more_than_is_there(value: memoryview) -> None:
    with pytest.raises(WireError):
        values.decode(value)


def test_values_nest_deep_enough() -> None:
    assert values.decode(encoded(nested(3))) == [[[None]]]


def test_a_value_without_an_onnx_type_is_refused() -> None:
    with pytest.raises(WireError):
        values.encode([np.array(["2001-01-01"], "datetime64[D]")])


def test_errors_keep_type_message_fields_and_story() -> None:
    inputs = [{"name": "x", "shape": (2, 3)}]
    error = errors.KernelError("node n failed", node="n", inputs=inputs, cause=ValueError("v"))
    plain = msgpack.unpackb(msgpack.packb(error_to_plain(error)))
    again = error_from_plain(plain, [errors.KernelError])
    assert type(again) is errors.KernelError and str(again) == "node n failed"
    assert again.fields() == {**error.fields(), "inputs": [{"name": "x", "shape": [2, 3]}], "cause": "v"}
    assert error_from_plain(error_to_plain(ValueError("no")), [errors.KernelError]) is None
