"""What the commands are made of: agreement, made inputs, .npz files, summaries."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest

from outrider.scheduler.errors import InvalidOptionError
from outrider.scheduler.nodearg import NodeArg, type_name
from outrider.tools.agree import agree
from outrider.tools.inputs import (
    DataFileError,
    flatten,
    free_dimensions,
    make_inputs,
    read_inputs,
    read_npz,
    restore,
    write_npz,
)
from outrider.tools.text import plain, row, summarize, table

pytestmark = pytest.mark.fast


def arg(name, dtype, shape):
    return NodeArg(name, type_name(dtype), shape, dtype)


BASE = np.array([1.0, -2.0, 0.5], np.float32)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (BASE, BASE.copy()),
        (BASE + np.float32(0.0019), BASE),  # 1e-3 of the largest magnitude, 2
        (BASE.astype(">f4"), BASE),
        (np.array([np.nan, np.inf, 1], np.float32), np.array([np.nan, np.inf, 1], np.float32)),
        (np.array([1, 2]), np.array([1, 2])),
        (np.array(["a"], object), np.array(["a"])),
        (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)),
        (BASE.astype(ml_dtypes.bfloat16), BASE.astype(ml_dtypes.bfloat16)),
        (np.array([1 + 1j]), np.array([1 + 1.0001j])),
        ([BASE, BASE], [BASE, BASE]),
        ({1: BASE}, {1: BASE}),
        (None, None),
    ],
)
def test_agree(ours, theirs):
    assert agree(ours, theirs) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (BASE + np.float32(0.0021), BASE, "over 0.002"),
        (BASE.astype(np.float64), BASE, "dtype float64 instead of float32"),
        (BASE[None], BASE, r"shape \[1, 3\] instead of \[3\]"),
        (np.array([1, 2]), np.array([1, 3]), "1 of 2 elements"),
        (np.array(["a"]), np.array(["b"]), "1 of 1 elements"),
        (np.array([np.nan], np.float32), np.array([1], np.float32), "NaN or infinity where"),
        (np.array([1], np.float32), np.array([np.nan], np.float32), "other places"),
        (np.array([-np.inf], np.float32), np.array([np.inf], np.float32), "other places"),
        (np.array([1e-30], np.float32), np.zeros(1, np.float32), "over 0"),
        ([BASE], [BASE, BASE], "1 items instead of 2"),
        ([BASE, -BASE], [BASE, BASE], "item 1"),
        ({1: BASE}, {2: BASE}, "keys"),
        (BASE, [BASE], "a tensor instead of a sequence"),
        (None, BASE, "an empty optional instead of a tensor"),
    ],
)
def test_disagree(ours, theirs, reason):
    assert re.search(reason, agree(ours, theirs))


def test_tolerance_counts():
    assert agree(BASE + np.float32(0.1), BASE, 0.1) is None
    assert agree(BASE + np.float32(1e-6), BASE, 0) is not None


SIGNATURE = [
    arg("f", "float32", ["n", 3]), arg("h", "bfloat16", [2]), arg("i", "int64", ["n", None]), arg("b", "bool", [100]),
    arg("q", "int4", [100]), arg("s", "string", [50]), arg("z", "complex64", [2]), arg("t", "string", []),
    arg("seq", "sequence(float32)", []), arg("opt", "optional(float32)", []), arg("map", "map(int64,float32)", []),
]  # fmt: skip


def test_inputs_are_made_from_the_signature():
    made = make_inputs(SIGNATURE, seed=1, dims={"n": 4})
    assert list(made) == [one.name for one in SIGNATURE]
    assert {name: (value.dtype.name, value.shape) for name, value in made.items() if isinstance(value, np.ndarray)} == {
        "f": ("float32", (4, 3)), "h": ("bfloat16", (2,)), "i": ("int64", (4, 1)), "b": ("bool", (100,)),
        "q": ("int4", (100,)), "s": ("object", (50,)), "z": ("complex64", (2,)), "t": ("object", ()),
    }  # fmt: skip
    assert set(made["q"].astype(int)) == set(made["b"].astype(int)) == {0, 1}
    assert [item.dtype.name for item in made["seq"]] == ["float32"]
    assert made["opt"] is None
    assert made["map"] == {}
    again, other = make_inputs(SIGNATURE, 1, {"n": 4}), make_inputs(SIGNATURE, 2, {"n": 4})
    np.testing.assert_array_equal(made["f"], again["f"])
    assert not np.array_equal(made["f"], other["f"])
    assert make_inputs(SIGNATURE)["f"].shape == (1, 3)
    normals = make_inputs([arg("x", "float32", [100_000])])["x"]
    assert abs(normals.mean()) < 0.02
    assert abs(normals.std() - 1) < 0.02


def test_a_dimension_without_a_symbol_is_named_by_its_input_and_axis():
    assert free_dimensions(SIGNATURE) == ["i.1", "n"]
    assert make_inputs(SIGNATURE, dims={"i.1": 5})["i"].shape == (1, 5)


def test_unknown_free_dimension():
    with pytest.raises(InvalidOptionError, match="Free are: i.1, n"):
        make_inputs(SIGNATURE, dims={"batch": 2})


def test_files_keep_values_and_dtypes(tmp_path):
    values = {
        "a/b:0": BASE, "file": np.array([1]), "bf": BASE.astype(ml_dtypes.bfloat16), "i4": np.array([-8],
        ml_dtypes.int4),
        "text": np.array([["é", ""]], object), "seq": [BASE, BASE[:1]], "map": {"k": BASE}, "none": None,
        "scalar": np.float32(2),
    }  # fmt: skip
    path = tmp_path / "out.npz"
    write_npz(str(path), values)
    assert os.listdir(tmp_path) == ["out.npz"]
    read = read_npz(str(path))
    assert list(read) == ["a/b:0", "file", "bf", "i4", "text", "seq[0]", "seq[1]", "map['k']", "scalar"]
    np.testing.assert_array_equal(read["a/b:0"], BASE)
    for name, dtype in [("bf", "bfloat16"), ("i4", "int4")]:
        back = restore(read[name], dtype)
        assert back.dtype == values[name].dtype
        np.testing.assert_array_equal(back, values[name])
    assert read["text"].tolist() == [["é", ""]]
    assert read["scalar"].shape == ()
    assert [name for name, _ in flatten("y", [{"a": [BASE, None]}])] == ["y[0]['a'][0]"]


def test_inputs_from_npy_files(tmp_path):
    np.save(tmp_path / "x.npy", BASE)
    read = read_inputs([f"x={tmp_path}/x.npy", f"a=b={tmp_path}/x.npy"])
    assert list(read) == ["x", "a=b"]
    np.testing.assert_array_equal(read["x"], BASE)
    for texts in ([f"{tmp_path}/x.npy"], [f"x={tmp_path}/x.npy"] * 2, ["=x.npy"]):
        with pytest.raises(InvalidOptionError):
            read_inputs(texts)


def test_files_that_cannot_be_used(tmp_path):
    np.save(tmp_path / "one.npy", BASE)
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "cut.npz").write_bytes(b"PK\3\4abc")
    for path in ["one.npy", "pickled.npy", "text.npz", "cut.npz", "absent.npz", "."]:
        with pytest.raises(DataFileError):
            read_npz(str(tmp_path / path))
    for path in ["text.npz", "pickled.npy", "absent.npy"]:
        with pytest.raises(DataFileError):
            read_inputs([f"x={tmp_path / path}"])
    with pytest.raises(DataFileError):
        write_npz(str(tmp_path / "no" / "folder.npz"), {"a": BASE})
    (tmp_path / "folder.npz").mkdir()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DataFileError):
        write_npz(str(tmp_path / "folder.npz"), {"a": BASE})
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("value", "facts", "cells"),
    [
        (BASE, {"dtype": "float32", "shape": [3], "min": -2.0, "max": 1.0}, ["float32", "[3]", "min -2"]),
        (np.array([[1, 3]]), {"dtype": "int64", "shape": [1, 2], "min": 1, "mean": 2.0, "max": 3}, ["int64", "mean 2"]),
        (np.array(["a"] * 9, object), {"dtype": "string", "first": ["a"] * 4}, ["string", "'a', 'a'"]),
        (np.empty((0, 2), np.float32), {"shape": [0, 2]}, ["[0, 2]", "empty"]),
        (BASE.astype(ml_dtypes.bfloat16), {"dtype": "bfloat16", "min": -2.0}, ["bfloat16"]),
        (np.array([True, False]), {"dtype": "bool", "min": 0, "mean": 0.5, "max": 1}, ["bool"]),
        ([BASE], {"kind": "sequence", "count": 1}, ["sequence", "1 items"]),
        ({}, {"kind": "map", "count": 0}, ["map"]),
        (None, {"kind": "none"}, ["none"]),
    ],
)
def test_summary(value, facts, cells):
    got = summarize(value)
    assert {key: got[key] for key in facts} == facts
    text = " | ".join(row("y", got))
    assert all(cell in text for cell in cells)
    json.dumps(plain(got), allow_nan=False)


def test_plain_data_and_tables():
    document = plain({"a": np.float32(1.5), "b": (np.int64(2), float("nan")), "c": {3: float("inf")}, "d": object})
    assert document == {"a": 1.5, "b": [2, "nan"], "c": {"3": "inf"}, "d": "<class 'object'>"}
    assert table(["name", "n"], [["long name", "1"], ["b", ""]]) == ["name       n", "long name  1", "b"]
