"""The list of differences from onnxruntime is complete, and each difference in behaviour is one."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import outrider
from outrider import errors
from outrider.scheduler.differences import ABSENT
from outrider.scheduler.dropin import refuse_cpu
from outrider.scheduler.dropin_options import ENTRIES, INDIFFERENT, ONLY, RUN_ENTRIES, is_foreign_entry
from outrider.scheduler.specs import parse_providers
from tests.builders import chain, model, node, tensor

ROOT = Path(__file__).resolve().parent.parent
CPU = ["CPUExecutionProvider"]
X = np.array([[-2, -1, 0.5, 3]], np.float32)
RELU = chain("Relu")


def _make() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("make_differences", ROOT / "docs" / "differences" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = _make()


# Names --------------------------------------------------------------------------------------------------------------
def public(of: Any) -> set[str]:
    names = module_names() if of is onnxruntime else dir(of)
    return {name for name in names if not name.startswith("_")}


@cache
def module_names() -> list[str]:
    """The names in a fresh process: whoever imports `onnxruntime.quantization` adds one here."""
    command = [sys.executable, "-c", "import onnxruntime, json; print(json.dumps(dir(onnxruntime)))"]
    names: list[str] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return names


def objects() -> dict[str, tuple[Any, Any]]:
    """Where -> onnxruntime's and ours; instances where attributes are made by the constructor."""
    session = onnxruntime.InferenceSession(RELU.SerializeToString(), providers=CPU)
    same = ("InferenceSession", "OrtValue", "IOBinding")
    return {
        "onnxruntime": (onnxruntime, outrider),
        **{name: (getattr(onnxruntime, name), getattr(outrider, name)) for name in same},
        "SessionOptions": (onnxruntime.SessionOptions(), outrider.SessionOptions()),
        "RunOptions": (onnxruntime.RunOptions(), outrider.RunOptions()),
        "NodeArg": (session.get_inputs()[0], outrider.NodeArg("x", "tensor(float)", [], "float32")),
        "ModelMetadata": (session.get_modelmeta(), outrider.ModelMetadata()),
    }


OBJECTS = objects()


@pytest.mark.fast
@pytest.mark.parametrize("where", ABSENT)
def test_every_name_is_there_or_in_the_list(where: str) -> None:
    theirs, ours = OBJECTS[where]
    there = {name for name in public(theirs) if hasattr(ours, name)}
    assert public(theirs) - there - set(ABSENT[where]) == set(), "neither there nor in differences.ABSENT"
    assert there & set(ABSENT[where]) == set(), "in differences.ABSENT, and there all the same"


def absent_names() -> Iterator[tuple[str, str]]:
    return ((where, name) for where, names in ABSENT.items() for name in names)


@pytest.mark.fast
def test_an_absent_name_is_explained() -> None:
    instances = {"OrtValue": outrider.OrtValue(X), "InferenceSession": object.__new__(outrider.InferenceSession)}
    instances["IOBinding"] = object.__new__(outrider.IOBinding)
    for where, name in absent_names():
        ours = instances.get(where, OBJECTS[where][1])
        with pytest.raises(errors.NoSuchNameError, match=re.escape(ABSENT[where][name])) as caught:
            getattr(ours, name)
        assert isinstance(caught.value, (AttributeError, NotImplementedError))
        assert caught.value.option.endswith(name)
    with pytest.raises(AttributeError, match="no_such_name") as other:
        outrider.SessionOptions().no_such_name  # noqa: B018
    assert type(other.value) is AttributeError


def arity(what: Any) -> int | None:
    """Positional arguments of a native function, told by its docstring, without `self`; None if that tells nothing."""
    first = (what.__doc__ or "").strip().partition("\n")[0]
    inside = re.match(r"\w+\((.*)\)", first)
    if inside is None:
        return None
    words = re.findall(r"(?:^|, )(\w+):", inside[1])
    return len([word for word in words if word != "self"])


def form_fault(theirs: Any, ours: Any) -> str:
    """Why a call of theirs would not be one of ours; '' if it would."""
    mine = [one for one in inspect.signature(ours).parameters.values() if one.name != "self"]
    renamed = getattr(ours, "renamed", {})
    try:
        signature = inspect.signature(theirs)
    except ValueError:
        count = arity(theirs)
        places = [one for one in mine if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        needed = [one for one in places if one.default is one.empty]
        if count is None or len(needed) <= count <= len(places):
            return ""
        return f"{count} arguments, ours takes {len(places)}"
    for place, one in enumerate(p for p in signature.parameters.values() if p.name != "self"):
        if one.kind is one.VAR_KEYWORD:
            continue
        if place >= len(mine):
            return f"ours has no {one.name}"
        other = mine[place]
        if other.name != renamed.get(one.name, one.name) and one.kind is not one.POSITIONAL_ONLY:
            return f"{one.name} is called {other.name}"
        if one.default is not one.empty and other.default is other.empty:
            return f"{one.name} may be left out"
    return ""


@pytest.mark.fast
@pytest.mark.parametrize("where", ABSENT)
def test_what_is_there_is_called_in_the_same_way(where: str) -> None:
    theirs, ours = OBJECTS[where]
    faults = {}
    for name in public(theirs) - set(ABSENT[where]):
        one, other = getattr(theirs, name), getattr(ours, name)
        if isinstance(one, type):
            if hasattr(one, "__members__"):
                assert {key: int(value) for key, value in one.__members__.items()} == {
                    key: int(value) for key, value in other.__members__.items()
                }
        elif callable(one) != callable(other):
            faults[name] = "one can be called, the other not"
        elif callable(one):
            faults[name] = form_fault(one, other)
    if where in ("InferenceSession", "IOBinding"):
        faults["__init__"] = form_fault(theirs.__init__, ours.__init__)
    assert {name: fault for name, fault in faults.items() if fault} == {}


@pytest.mark.fast
def test_one_argument_under_both_names_is_refused() -> None:
    with pytest.raises(TypeError, match="'model' and 'path_or_bytes', two names of one argument"):
        outrider.InferenceSession(model=RELU, path_or_bytes=RELU)  # type: ignore[call-arg]


def test_a_fault_of_form_is_found() -> None:
    def theirs(name: str, device: str = "cpu") -> None: ...

    assert form_fault(theirs, lambda name: None) == "ours has no device"
    assert form_fault(theirs, lambda device, name: None) == "name is called device"
    assert form_fault(theirs, lambda name, device: None) == "device may be left out"
    assert form_fault(theirs, lambda name, device="cpu", more=1: None) == ""
    native = onnxruntime.SessionOptions().add_session_config_entry
    assert arity(native) == 2
    assert form_fault(native, lambda key: None) == "2 arguments, ours takes 1"


# Options ------------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_every_attribute_of_options_is_accounted_for() -> None:
    """Means the same here, makes no difference, or has one value only."""
    same = {
        "SessionOptions": {
            "graph_optimization_level", "intra_op_num_threads", "enable_profiling", "profile_file_prefix",
        },
        "RunOptions": {"terminate"},
    }  # fmt: skip
    for where, meaning in same.items():
        theirs = OBJECTS[where][0]
        attributes = {name for name in public(theirs) if not callable(getattr(theirs, name))}
        only = set(ONLY) if where == "SessionOptions" else set()
        assert attributes == meaning | set(INDIFFERENT[where]) | only
        for name in attributes:
            default, value = getattr(theirs, name), getattr(OBJECTS[where][1], name)
            assert getattr(default, "name", default) == getattr(value, "name", value), f"another default of {name}"


@pytest.mark.fast
def test_entries_are_as_listed() -> None:
    for key, values in ENTRIES.items():
        assert is_foreign_entry(key)
        for value in values or ("",):
            options = outrider.SessionOptions()
            options.add_session_config_entry(key, value)
            assert options.get_session_config_entry(key) == value
        if values is not None:
            with pytest.raises(errors.UnsupportedOptionError, match=re.escape(key)):
                outrider.SessionOptions(config={key: "something else"})
    for key, values in RUN_ENTRIES.items():
        options = outrider.RunOptions(config={key: (values or ("cpu:0",))[0]})
        assert options.get_run_config_entry(key)
    with pytest.raises(errors.UnsupportedOptionError, match="gpu_graph_id"):
        outrider.RunOptions(config={"gpu_graph_id": "1"})
    with pytest.raises(errors.UnknownOptionError, match="memory.enable_memory_arena_shrinkage"):
        outrider.RunOptions().add_run_config_entry("nonsense", "1")


# Behaviour: one test for each entry of BEHAVIOUR --------------------------------------------------------------------
def ours(made: Any = RELU, options: Any = None, providers: Any = None, **more: Any) -> outrider.InferenceSession:
    return outrider.InferenceSession(made, options, providers, **more)


@pytest.fixture(scope="module")
def session() -> Iterator[outrider.InferenceSession]:
    with ours(providers=CPU) as made:
        yield made


def theirs(made: Any = RELU, options: Any = None, providers: Any = None) -> Any:
    return onnxruntime.InferenceSession(made.SerializeToString(), options, providers or CPU)


def test_a_provider_that_is_absent() -> None:
    with pytest.raises(errors.ProviderUnavailableError, match="CUDAExecutionProvider"):
        ours(providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        assert theirs(providers=["CUDAExecutionProvider", "CPUExecutionProvider"]).get_providers() == CPU
    chosen = [outrider.ProviderSpec("CUDAExecutionProvider", required=False), "CPUExecutionProvider"]
    with ours(providers=chosen) as session:
        assert session.get_providers() == CPU


def test_a_provider_that_nobody_knows() -> None:
    with pytest.raises(errors.UnknownProviderError):
        ours(providers=["Cpu"])


def test_an_empty_list_of_providers() -> None:
    with pytest.raises(errors.InvalidOptionError):
        ours(providers=[])


def test_names_of_providers() -> None:
    with ours() as session:
        assert session.get_providers() == ["cpu"]
    with ours(providers=["cpu", ("CPUExecutionProvider:1", {"compiled": False})]) as session:
        assert session.get_providers() == ["cpu", "CPUExecutionProvider:1"]
        assert session.get_provider_options() == {"cpu": {}, "CPUExecutionProvider:1": {"compiled": False}}
        assert list(session.health()) == ["cpu", "cpu:1"]


def test_other_providers_for_a_session(session: outrider.InferenceSession) -> None:
    session.set_providers(["cpu"])
    session.enable_fallback()
    with pytest.raises(errors.UnsupportedOptionError, match="make another one"):
        session.set_providers(["cpu:1"])
    with pytest.raises(errors.UnsupportedOptionError, match="fallback=False"):
        session.disable_fallback()
    with ours(options=outrider.SessionOptions(fallback=False)) as other:
        other.disable_fallback()


@pytest.mark.fast
def test_fallback_to_the_cpu() -> None:
    options = outrider.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    for listed in (
        None,
        CPU,
        ["CUDAExecutionProvider", "cpu"],
        ["ort"],
        ["null", "ort:CPUExecutionProvider"],
        ["CUDAExecutionProvider?cpu_fallback=true"],
    ):
        with pytest.raises(errors.InvalidOptionError, match="disable_cpu_ep_fallback"):
            ours(options=options, providers=listed)
    foreign = onnxruntime.SessionOptions()
    foreign.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    with pytest.raises(Exception, match="disabled fallback"):
        theirs(options=foreign)
    with pytest.raises(errors.InvalidOptionError, match="disable_cpu_ep_fallback"):
        ours(options=foreign, providers=CPU)
    for alone in ("CUDAExecutionProvider", ("ort", {"library": "/x/libep.so", "cpu_fallback": False})):
        (one,) = refuse_cpu(parse_providers([alone]))
        assert one.required == "all"
    assert [spec.required for spec in refuse_cpu(parse_providers(["null", "CUDAExecutionProvider"]))] == ["start"] * 2


def test_a_provider_alone_that_must_take_every_node() -> None:
    options = outrider.SessionOptions(config={"session.disable_cpu_ep_fallback": "1"})
    with pytest.raises(errors.HeterogeneousPlacementRequiredError, match="Neg"):
        ours(chain("Relu", "Neg"), options, [f"{ROOT}/tests/own_providers.py:MyProvider"])


@pytest.mark.fast
def test_keywords_of_a_session() -> None:
    with pytest.raises(TypeError, match="read_config_from_model"):
        ours(read_config_from_model=1)


def test_a_model_may_be_a_proto(session: outrider.InferenceSession) -> None:
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
    with pytest.raises(TypeError):
        onnxruntime.InferenceSession(RELU)


@pytest.mark.fast
def test_models_in_ort_format() -> None:
    with pytest.raises(errors.ModelLoadError):
        ours(b"\x18\0\0\0ORTM" + bytes(64))


def test_operators_of_the_cpu_provider() -> None:
    """One that onnxruntime has for its optimiser's use, and `cpu` has not."""
    product = node("TransposeMatMul", "x x", "y", "product", domain="com.microsoft", transA=1)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = model([product], [tensor("x", ["N", 4])], [tensor("y", [4, 4])], opset_imports=opsets)
    (expected,) = theirs(made).run(None, {"x": X})
    with pytest.raises(errors.UnsupportedOpError, match="com.microsoft::TransposeMatMul"):
        ours(made, providers=CPU)
    with ours(made, providers=[*CPU, "ort"]) as session:
        np.testing.assert_allclose(session.run(None, {"x": X})[0], expected, rtol=1e-6)


def test_a_fork_of_the_process(session: outrider.InferenceSession) -> None:
    child = os.fork()
    if not child:
        status = 1
        try:
            session.run(None, {"x": X})
        except errors.ForkedSessionError:
            status = 7
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))


@pytest.mark.fast
def test_the_version() -> None:
    assert outrider.get_version_string() == outrider.__version__ != onnxruntime.__version__
    assert outrider.__version__ in outrider.get_build_info()


@pytest.mark.fast
def test_levels_that_read_as_all() -> None:
    for level in ("ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT"):
        options = outrider.SessionOptions(optimization="none")
        options.graph_optimization_level = getattr(outrider.GraphOptimizationLevel, level)
        assert options.optimization == "all"
        assert options.graph_optimization_level is outrider.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # theirs does, too
        assert options.optimization == "basic"


@pytest.mark.fast
def test_options_are_checked_when_set() -> None:
    options = outrider.SessionOptions()
    for name, value in (("intra_op_num_threads", -1), ("log_severity_level", 9), ("max_in_flight", 0)):
        with pytest.raises(errors.InvalidOptionError, match=name):
            setattr(options, name, value)
    for name, value in (
        ("execution_mode", outrider.ExecutionMode.ORT_PARALLEL),
        ("optimized_model_filepath", "x.onnx"),
        ("execution_order", outrider.ExecutionOrder.PRIORITY_BASED),
    ):
        with pytest.raises(errors.UnsupportedOptionError, match=name):
            setattr(options, name, value)
    with pytest.raises(errors.UnsupportedOptionError, match="session.compile_only"):
        options.add_session_config_entry("session.compile_only", "1")
    with pytest.raises(errors.UnknownOptionError):
        options.add_session_config_entry("nonsense", "1")
    assert options == outrider.SessionOptions()
    onnxruntime.SessionOptions().add_session_config_entry("nonsense", "1")


def test_dimensions_that_are_not_there() -> None:
    options = outrider.SessionOptions()
    options.add_free_dimension_override_by_name("M", 2)
    with pytest.raises(errors.InvalidOptionError, match="N"):
        ours(options=options)
    foreign = onnxruntime.SessionOptions()
    foreign.add_free_dimension_override_by_name("M", 2)
    theirs(options=foreign)


def test_options_of_onnxruntime(tmp_path: Path) -> None:
    foreign = onnxruntime.SessionOptions()
    foreign.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    foreign.intra_op_num_threads = 1
    foreign.inter_op_num_threads = 4
    foreign.enable_profiling = True
    foreign.profile_file_prefix = str(tmp_path / "profile")
    foreign.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    foreign.add_free_dimension_override_by_name("N", 7)  # cannot be seen
    with ours(options=foreign) as session:
        taken = session.get_session_options()
        assert (taken.optimization, taken.intra_op_num_threads, taken.base_dir) == ("basic", 1, str(tmp_path))
        assert session.get_inputs()[0].shape == ["N", 4]
        limits = onnxruntime.RunOptions()
        limits.logid = "mine"
        np.testing.assert_array_equal(session.run(None, {"x": X}, limits)[0], np.maximum(X, 0))
        limits.terminate = True
        with pytest.raises(errors.RunCancelledError):
            session.run(None, {"x": X}, limits)
    assert len(list(tmp_path.glob("profile_*.json"))) == 1  # the end of the session writes it


def test_symbols_have_one_size() -> None:
    inputs = [tensor("a", ["N"]), tensor("b", ["N"])]
    made = model([node("Neg", "a", "y"), node("Neg", "b", "z")], inputs, [tensor("y", ["N"]), tensor("z", ["N"])])
    feed = {"a": X[0], "b": X[0, :2]}
    assert theirs(made).run(["z"], feed)[0].shape == (2,)
    with ours(made) as session, pytest.raises(errors.SymbolConflictError, match="N"):
        session.run(["z"], feed)


def test_runs_to_come() -> None:
    with ours() as session:
        future = session.run_async(None, {"x": X})
        np.testing.assert_array_equal(future.result(60)[0], np.maximum(X, 0))
        with pytest.raises(errors.RankMismatchError):
            session.run_async(None, {"x": X[0]}, lambda *told: None)


def test_binding_is_checked_when_bound(session: outrider.InferenceSession) -> None:
    with pytest.raises(errors.OutputNotFoundError):
        session.io_binding().bind_output("no_such_output")
    theirs().io_binding().bind_output("no_such_output")


def test_a_profile(session: outrider.InferenceSession) -> None:
    with pytest.raises(errors.TraceError):
        session.end_profiling()
    assert theirs().end_profiling() == ""


def test_a_run_that_is_terminated() -> None:
    slow = ("chaos", {"fault": "hang", "phase": "run", "node": "Relu"})
    with ours(providers=[slow]) as session:
        limits = outrider.RunOptions()
        future = session.run_async(None, {"x": X}, run_options=limits)
        limits.terminate = True
        with pytest.raises(errors.RunCancelledError):
            future.result(60)
        with pytest.raises(errors.RunCancelledError):
            session.run(None, {"x": X}, limits)
        limits.terminate = False
        assert not limits.terminator.cancelled


@pytest.mark.fast
def test_devices() -> None:
    with pytest.raises(errors.UnsupportedOptionError, match="device_type"):
        outrider.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
    with pytest.raises(errors.InvalidOptionError, match="2 bytes"):
        outrider.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(2, np.uint16), TensorProto.FLOAT)


@pytest.mark.fast
def test_random_numbers() -> None:
    assert not hasattr(outrider, "set_seed")


@pytest.mark.fast
def test_the_log() -> None:
    logger = logging.getLogger("outrider")
    before = logger.level
    try:
        for severity, level in enumerate((logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)):
            outrider.set_default_logger_severity(severity)
            assert logger.level == level
        with pytest.raises(errors.InvalidOptionError):
            outrider.set_default_logger_severity(9)
        outrider.set_default_logger_verbosity(1)
    finally:
        logger.setLevel(before)


# The page -----------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_each_difference_has_its_test() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(MAKE.BEHAVIOUR) <= tests


@pytest.mark.fast
def test_errors_of_the_page_exist() -> None:
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    for told, names in MAKE.ERRORS.items():
        for name in told.partition(" (")[0].split(", "):
            assert name == "ValueError" or issubclass(getattr(native, name), Exception)
        assert all(issubclass(getattr(errors, name), errors.OutriderError) for name in names)


@pytest.mark.fast
def test_the_page_is_up_to_date() -> None:
    assert MAKE.PAGE.read_text() == MAKE.page(), "run: python docs/differences/make.py --write"
