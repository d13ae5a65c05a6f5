"""What `providers=` accepts, and what each entry becomes."""

import collections
import os

import pytest

from outrider.scheduler.errors import InvalidOptionError, UnknownProviderError, UnsupportedOptionError
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.specs import BUILT_IN, Target, parse_provider, parse_providers, target

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("entry", "display", "where"),
    [
        ("cpu", "cpu", Target(kind="cpu")),
        ("cpu:0", "cpu", Target(kind="cpu")),
        ("cpu:2", "cpu:2", Target(kind="cpu", instance=2)),
        (" null ", "null", Target(kind="null")),
        ("CPUExecutionProvider", "cpu", Target(kind="cpu")),
        ("pack.age:Mine", "pack.age:Mine", Target(module="pack.age", name="Mine")),
        ("module:Mine:0", "module:Mine", Target(module="module", name="Mine")),
        ("module:Mine:12", "module:Mine:12", Target(module="module", name="Mine", instance=12)),
        (("cpu", {"a": 1}), "cpu", Target(kind="cpu")),
        (ProviderSpec("cpu:0", name="fast"), "fast", Target(kind="cpu")),
        (ProviderSpec("cpu:1"), "cpu:1", Target(kind="cpu", instance=1)),
    ],
)
def test_entry(entry, display, where):
    spec = parse_provider(entry)
    assert spec.display == display
    assert target(spec.kind) == where
    assert parse_provider(spec) == spec


def test_file_becomes_absolute_and_keeps_its_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for entry, display in [("mine.py:Relu", "mine.py:Relu"), ("./mine.py:Relu:1", "./mine.py:Relu:1")]:
        spec = parse_provider(entry)
        assert spec.display == display
        assert target(spec.kind).file == os.path.join(os.path.realpath(tmp_path), "mine.py")
        assert target(spec.kind).name == "Relu"
    assert parse_provider(ProviderSpec("mine.py:Relu", name="mine")).display == "mine"


def test_options_and_settings_stay_with_the_provider():
    assert parse_provider(("cpu", {"a": 1})).options == {"a": 1}
    spec = parse_provider(ProviderSpec("cpu:0", threads=2, env={"A": "b"}, required=False))
    assert (spec.threads, spec.env, spec.required) == (2, {"A": "b"}, False)


@pytest.mark.parametrize(
    "entry",
    ["cuda", "cuda:0", "sim:0", "openvino"],
)  # fmt: skip
def test_known_but_not_built(entry):
    with pytest.raises(UnsupportedOptionError) as caught:
        parse_provider(entry)
    assert caught.value.value == entry


@pytest.mark.parametrize(
    ("entry", "near"), [("cpuu", "cpu"), ("CPU", "cpu"), ("nul", "null"), ("zzz", ", ".join(BUILT_IN))]
)
def test_unknown_word_names_near_ones(entry, near):
    with pytest.raises(UnknownProviderError, match=near) as caught:
        parse_provider(entry)
    assert caught.value.provider == entry


@pytest.mark.parametrize(
    "entry",
    ["", "  ", "cpu:x", "missing.py:Mine", "missing.py", "a b:Mine", "m:1Mine", "m:", ":Mine", "a..b:Mine",
     3, None, b"cpu", ("cpu",), ("cpu", []), ["cpu", {}]],
)  # fmt: skip
def test_malformed_entry(entry):
    with pytest.raises(InvalidOptionError):
        parse_provider(entry)


def test_class_of_main_is_refused_with_the_way_out():
    mine = type("Mine", (), {"__module__": "__main__"})
    for entry in ("__main__:Mine", mine):
        with pytest.raises(InvalidOptionError, match=r"that_file\.py:Mine"):
            parse_provider(entry)
    with pytest.raises(InvalidOptionError, match="'collections:OrderedDict'"):
        parse_provider(collections.OrderedDict)


def test_list_of_providers():
    assert [spec.display for spec in parse_providers(None)] == ["cpu"]
    assert [spec.display for spec in parse_providers(("null", "cpu", "cpu:1"))] == ["null", "cpu", "cpu:1"]
    same = [["cpu", "cpu:0"], ["cpu", "CPUExecutionProvider"], ["null", ProviderSpec("cpu", name="null")]]
    for bad in [[], "cpu", 3, *same]:
        with pytest.raises(InvalidOptionError):
            parse_providers(bad)


def test_provider_options_as_in_onnxruntime():
    specs = parse_providers(["cpu", "null"], [{"a": 1}, {}])
    assert [dict(spec.options) for spec in specs] == [{"a": 1}, {}]
    for bad in [[{}], {}, "a", [{}, {}, {}], [1, 2]]:
        with pytest.raises(InvalidOptionError):
            parse_providers(["cpu", "null"], bad)
    with pytest.raises(InvalidOptionError):
        parse_providers([("cpu", {"a": 1})], [{"a": 2}])


@pytest.mark.parametrize(
    ("entry", "kind"),
    [("ort", "ort"), ("ort:1", "ort:1"), ("ort:SomeEP:0", "ort:SomeEP"),
     ("CUDAExecutionProvider", "ort:CUDAExecutionProvider"),
     ("TensorrtExecutionProvider:1", "ort:TensorrtExecutionProvider:1")],
)  # fmt: skip
def test_execution_providers_of_onnxruntime(entry, kind):
    assert parse_provider(entry).kind == kind
