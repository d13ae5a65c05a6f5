"""Whether what arrived is what the model declares, against numpy's own idea of it; and records that are anything."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.providers.wire.declared import Declarations, PooledDeclarations, has_type, layout_misfit, value_misfit
from outrider.providers.wire.dtypes import BY_NUMBER, NUMBER, is_tensor, numpy_dtype
from outrider.providers.wire.graph import Value
from outrider.shm.board import ENCODED, NONE, OWN, TENSOR, BoardReader, BoardWriter, Layout, arena_start
from outrider.shm.errors import LayoutError
from outrider.shm.segment import Segment, create_segment

pytestmark = pytest.mark.fast


def layout(
    kind: int, dtype: str = "float32", shape: tuple[int, ...] = (2, 3), itemsize: int = 0, **more: Any
) -> Layout:
    size = itemsize or (numpy_dtype(dtype).itemsize if is_tensor(dtype) else 1)
    return Layout(kind, NUMBER[dtype], size, shape, 0, size * int(np.prod(shape)), **more)


@pytest.mark.parametrize(
    ("declared", "found", "words"),
    [
        (Value("v", "float32", ("N", 3)), layout(TENSOR), ""),
        (Value("v", "float32", (9, 9)), layout(TENSOR), ""),  # models that were edited tell such things
        (Value("v", "float32", None), layout(TENSOR, shape=()), ""),
        (Value("v"), layout(TENSOR, "int64"), ""),
        (Value("v", "optional(float32)"), layout(TENSOR), ""),
        (Value("v", "optional(float32)"), layout(NONE, shape=()), ""),
        (Value("v", "sequence(float32)"), layout(ENCODED), ""),
        (Value("v", "string"), layout(ENCODED), ""),
        (Value("v"), layout(ENCODED), ""),
        (Value("v"), layout(NONE), ""),
        (Value("v", "float32", (1, 2, 3)), layout(TENSOR), "rank is 2, 3 is declared"),
        (Value("v", "float32"), layout(TENSOR, "int32"), "dtype is int32, float32 is declared"),
        (Value("v", "sequence(float32)"), layout(TENSOR), "dtype is float32, sequence"),
        (Value("v", "optional(int32)"), layout(TENSOR), "dtype is float32, optional"),
        (Value("v"), layout(TENSOR, "string"), "dtype number 8 is none"),
        (Value("v"), layout(TENSOR, "undefined"), "dtype number 0 is none"),
        (Value("v"), layout(TENSOR, itemsize=8), "does not have 8 bytes"),
        (Value("v", "float32"), layout(ENCODED), "it is encoded"),
        (Value("v", "optional(float32)"), layout(ENCODED), "it is encoded"),
        (Value("v", "float32"), layout(NONE), "it is no value"),
        (Value("v", "sequence(float32)"), layout(NONE), "it is no value"),
    ],
)
def test_layouts(declared: Value, found: Layout, words: str) -> None:
    misfit = layout_misfit(declared, found)
    assert words in misfit and bool(words) == bool(misfit)
    assert Declarations({3: declared}).misfit(3, found) == misfit
    assert Declarations({3: declared}).misfit(4, found) == ""


@pytest.mark.parametrize(
    ("edge", "found", "words"),
    [
        (0, layout(TENSOR), ""),
        (1, layout(TENSOR, memory=5), ""),
        (1, layout(TENSOR, memory=5, block=2), ""),
        (0, layout(TENSOR, memory=5, block=2), "not for the caller only"),
        (1, layout(TENSOR, memory=5, block=2, shape=(40,)), "blocks lie below 100"),
        (1, layout(TENSOR, "int64", memory=5, block=2), "dtype is int64"),
    ],
)
def test_places_in_an_output_pool(edge: int, found: Layout, words: str) -> None:
    value = Value("v", "float32", None)
    misfit = PooledDeclarations({0: value, 1: value}, {1}, 100).misfit(edge, found)
    assert words in misfit and bool(words) == bool(misfit)


F, S = np.zeros(2, np.float32), np.array(["a"], object)


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        ("float32", [F, np.float32(1)], [None, [F], S, 1.0, F.astype("float64")]),
        ("string", [S, "a", b"a", np.array(["a"])], [F, ["a"], None]),
        ("sequence(float32)", [[], [F, F], (F,)], [F, None, [None], [S], {}, [F, F.astype("int64")]]),
        ("sequence(string)", [[S], ["a"]], [[F], "a"]),
        ("map(int64,float32)", [{}, {1: F}], [[F], F]),
        ("sequence(map(int64,float32))", [[{1: F}]], [[F], {1: F}]),
        ("optional(sequence(float32))", [None, [F]], [F, [None]]),
        ("undefined", [None, F, [F], {}], []),
        ("sparse(float32)", [F, {}], []),
    ],
)
def test_types_of_values(dtype: str, right: list[Any], wrong: list[Any]) -> None:
    assert all(has_type(one, dtype) for one in right)
    assert not any(has_type(one, dtype) for one in wrong)
    for one in wrong:
        assert f"{dtype} is declared" in value_misfit(Value("v", dtype), one)


def test_the_rank_of_strings_is_compared() -> None:
    assert value_misfit(Value("v", "string", ("N",)), S) == ""
    assert "rank is 1, 2 is declared" in value_misfit(Value("v", "string", ("N", 2)), S)


LIMIT = 1 << 24
START = arena_start(1, 1)
WORDS = st.one_of(
    st.integers(0, 30), st.sampled_from([START, START + 64, LIMIT, 1 << 32, 7 << 32 | 1, 1 << 63, (1 << 64) - 1])
)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.dictionaries(st.integers(0, 12), WORDS, max_size=4), st.sampled_from(sorted(BY_NUMBER.values())))
def test_a_record_is_an_error_or_an_array_within_bounds(spoilt: dict[int, int], dtype: str) -> None:
    fd, pool_fd = create_segment("board", LIMIT), create_segment("pool", LIMIT)
    segment, pool = Segment(fd, writable=True), Segment(pool_fd, writable=False)
    os.close(fd)
    os.close(pool_fd)
    writer = BoardWriter(segment, 1, 1, 7)
    declared = PooledDeclarations({0: Value("v", dtype)}, {0}, LIMIT // 2)
    reader = BoardReader(segment, 1, 1, 7, {7: pool}, declared.misfit)
    number = writer.number(0, 0, Layout(TENSOR, NUMBER["float32"], 4, (3, 4), START, 48))
    at, _ = writer.version_at(0, 0, number)
    for field, value in spoilt.items():
        segment.words[at + field] = value
    try:
        found = reader.layout(0, 0, number)
    except LayoutError:
        return
    if found.kind != TENSOR:
        assert found.kind == NONE or found.offset + found.nbytes <= LIMIT
        return
    name = BY_NUMBER[found.dtype]
    assert dtype in (name, "undefined")
    array = reader.memory_of(found).array(found.offset, numpy_dtype(name), found.shape)
    assert array.nbytes == found.nbytes and array.dtype != object
    assert found.offset >= (START if found.memory == OWN else 0)
