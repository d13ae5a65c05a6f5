"""Options: defaults as documented, every bad value a typed error, what is not built refused by name."""

import dataclasses
import inspect
import math
import pickle

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from outrider.scheduler.cancelling import CancelToken
from outrider.scheduler.dropin_options import ExecutionMode, ExecutionOrder, SessionAttributes
from outrider.scheduler.errors import InvalidOptionError, OutriderError, UnknownOptionError, UnsupportedOptionError
from outrider.scheduler.options import (
    ProviderSpec,
    RunOptions,
    SessionOptions,
    run_options,
    session_options,
)

pytestmark = pytest.mark.fast


def defaults(kind):
    return {
        one.name: one.default if one.default is not dataclasses.MISSING else one.default_factory()
        for one in dataclasses.fields(kind)
        if one.default is not dataclasses.MISSING or one.default_factory is not dataclasses.MISSING
    }


def test_defaults_of_the_public_interface():
    got = defaults(SessionOptions)
    assert got.pop("output_memory") > 0
    theirs = {one.name for one in dataclasses.fields(SessionAttributes)} - {"optimization", "config"}
    assert {name: got.pop(name) for name in theirs} == {
        "intra_op_num_threads": 0, "inter_op_num_threads": 0, "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
        "execution_order": ExecutionOrder.DEFAULT, "enable_profiling": False,
        "profile_file_prefix": "onnxruntime_profile_", "optimized_model_filepath": "", "enable_cpu_mem_arena": True,
        "enable_mem_pattern": True, "enable_mem_reuse": True, "log_severity_level": -1, "log_verbosity_level": 0,
        "logid": "", "use_deterministic_compute": False, "use_per_session_threads": True, "free_dimensions": {},
    }  # fmt: skip
    assert got == {
        "optimization": "all", "strategy": "priority", "fallback": True, "replay": True, "deadline": None,
        "partition_deadline": None, "start_deadline": 30, "claim_deadline": 60, "load_deadline": 600,
        "max_in_flight": 2, "queue": "block", "queue_size": 64, "pins": {}, "prefer": {}, "fleet": None,
        "base_dir": None, "spares": 0, "config": {},
    }  # fmt: skip
    assert defaults(RunOptions) == {
        "deadline": None, "partition_deadline": None, "cancel": None, "terminate": False, "log_severity_level": -1,
        "log_verbosity_level": 0, "logid": "", "only_execute_path_to_fetches": False, "config": {},
    }  # fmt: skip
    assert defaults(ProviderSpec) == {
        "name": None, "python": None, "env": {}, "threads": None, "cpus": None, "nice": None, "memory_limit": None,
        "required": "start", "options": {}, "debug": False, "wrap": [],
    }  # fmt: skip
    assert next(iter(inspect.signature(ProviderSpec).parameters)) == "kind"


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (SessionOptions, {name: value})
        for name, values in {
            "optimization": ["All", "fast", None, 0], "strategy": ["", "fastest"], "fallback": [1, "yes"],
            "replay": [None], "deadline": [0, -1, math.inf, math.nan, "5", True], "partition_deadline": [0, [1]],
            "start_deadline": [None, 0, "30"], "claim_deadline": [None, -1], "load_deadline": [None, math.nan],
            "max_in_flight": [0, 65, 1.5, True, "2", None], "queue": ["drop"], "queue_size": [0, -1, None],
            "pins": [None, ["a"], {"a": 1}, {1: "cpu"}], "prefer": [{"a": None}], "fleet": ["cpu"],
            "base_dir": ["/no/such/folder", 3], "spares": [-1, None, 2], "output_memory": [-1, 1.0, None],
            "config": [{"optimization": 1}, {"optimization": "fast"}, {"ep.context_enable": "yes"},
                       {"ep.context_embed_mode": "2"}],
        }.items()
        for value in values
    ] + [(RunOptions, {"deadline": -1}), (RunOptions, {"partition_deadline": "1"}), (RunOptions, {"cancel": True})]
    + [
        (ProviderSpec, {"kind": "cpu", name: value})
        for name, values in {
            "name": ["", 3], "env": [{"A": 1}, "A=1"], "threads": [0, -1, 2.0, True],
            "required": ["yes", True, None, 0],
            "options": [None, "fast", {"a": object()}, {"a": [{"b": np.float32(1)}]}, {"a": 1 << 64}, {"a": {1: 2}}],
            "debug": [1], "cpus": [[], [1 << 20], ["0"], 0, [True]], "nice": [20, -21, 1.0],
            "memory_limit": [0, 1 << 20, 1e9], "wrap": [[""], [1], 7],
        }.items()
        for value in values
    ] + [(ProviderSpec, {"kind": ""}), (ProviderSpec, {"kind": None})],
)  # fmt: skip
def test_bad_value_is_named(kind, given):
    name = [key for key in given if key != "kind"] or ["kind"]
    with pytest.raises(InvalidOptionError) as caught:
        kind(**given)
    assert caught.value.name.startswith(name[0])
    assert caught.value.expected
    assert caught.value.expected in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (SessionOptions, {"prefer": {"*": "cpu"}}),
        (SessionOptions, {"config": {"ep.context_enable": "1"}}),
        (SessionOptions, {"config": {"ep.context_file_path": "x"}}),
        (SessionOptions, {"config": {"ep.context_embed_mode": "0"}}),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(kind, given):
    with pytest.raises(UnsupportedOptionError) as caught:
        kind(**given)
    assert f"{kind.__name__}.{list(given)[-1]}" in caught.value.option
    assert caught.value.option in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "keyword", "near"),
    [(SessionOptions, "optimisation", "optimization"), (RunOptions, "dead_line", "deadline"),
     (ProviderSpec, "thread", "threads")],
)  # fmt: skip
def test_unknown_keyword_names_near_ones(kind, keyword, near):
    with pytest.raises(UnknownOptionError, match=f"Did you mean {near}") as caught:
        kind(**{keyword: 1})
    assert caught.value.name == keyword
    assert near in caught.value.known


def test_unknown_key_of_config():
    with pytest.raises(UnknownOptionError, match="Did you mean optimization"):
        SessionOptions(config={"optimisation": "none"})


@pytest.mark.parametrize(
    ("text", "level"),
    [("none", "none"), ("off", "none"), ("0", "none"), (" Basic\n", "basic"), ("ALL", "all")],
)
def test_optimization_in_config(text, level):
    assert SessionOptions(config={"optimization": text}).optimization == level


def test_optimization_given_twice_must_agree():
    assert SessionOptions(optimization="none", config={"optimization": "off"}).optimization == "none"
    with pytest.raises(InvalidOptionError):
        SessionOptions(optimization="none", config={"optimization": "basic"})


def test_config_at_its_defaults_is_accepted():
    SessionOptions(config={"ep.context_enable": " FALSE ", "ep.context_file_path": " ", "ep.context_embed_mode": "1"})


def test_options_do_not_change_after_the_check(tmp_path):
    pins = {"a": "cpu"}
    options = SessionOptions(pins=pins, base_dir=tmp_path, max_in_flight=64)
    pins["b"] = 1
    assert options.pins == {"a": "cpu"}
    with pytest.raises(TypeError):
        options.pins["b"] = 1
    taken = session_options(options, None)
    options.strategy = "cost"
    assert (taken.strategy, options.strategy) == ("priority", "cost")
    with pytest.raises(AttributeError, match="of a session do not change"):
        taken.strategy = "cost"
    with pytest.raises(InvalidOptionError):
        dataclasses.replace(options, max_in_flight=0)
    assert dataclasses.replace(options, max_in_flight=1).base_dir == str(tmp_path)


def test_repr_shows_what_differs():
    assert repr(SessionOptions()) == "SessionOptions()"
    assert repr(SessionOptions(optimization="none", pins={"a": "cpu"})) == (
        "SessionOptions(optimization='none', pins={'a': 'cpu'})"
    )
    assert repr(ProviderSpec("cpu", threads=2)) == "ProviderSpec(kind='cpu', threads=2)"


def test_cancel_token():
    token = CancelToken()
    assert not token.cancelled
    token.cancel()
    token.cancel()
    assert token.cancelled


def test_which_options_a_session_takes():
    ours = SessionOptions(optimization="basic")
    assert session_options(None, None) == SessionOptions()
    assert session_options(ours, None) == session_options(None, ours) == ours
    for bad in [(ours, ours), ({}, None), (None, {}), (None, onnxruntime.SessionOptions())]:
        with pytest.raises(InvalidOptionError):
            session_options(*bad)
    assert run_options(None) is None
    assert run_options(given := RunOptions(deadline=1)) is given
    with pytest.raises(InvalidOptionError):
        run_options({"deadline": 1})


@pytest.mark.parametrize(
    ("level", "ours"),
    [("ORT_DISABLE_ALL", "none"), ("ORT_ENABLE_BASIC", "basic"), ("ORT_ENABLE_EXTENDED", "all"),
     ("ORT_ENABLE_ALL", "all")],
)  # fmt: skip
def test_onnxruntime_options_are_read(level, ours):
    theirs = onnxruntime.SessionOptions()
    theirs.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    theirs.intra_op_num_threads = 3
    theirs.log_severity_level = 0
    theirs.add_session_config_entry("session.intra_op.allow_spinning", "0")
    entries = {"session.intra_op.allow_spinning": "0"}
    expected = SessionOptions(optimization=ours, intra_op_num_threads=3, log_severity_level=0, config=entries)
    assert session_options(theirs, None) == expected
    assert session_options(onnxruntime.SessionOptions(), None) == SessionOptions()


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("execution_mode", onnxruntime.ExecutionMode.ORT_PARALLEL), ("optimized_model_filepath", "x.onnx"),
     ("use_deterministic_compute", True)],
)  # fmt: skip
def test_onnxruntime_options_that_cannot_be_kept(attribute, value):
    theirs = onnxruntime.SessionOptions()
    setattr(theirs, attribute, value)
    with pytest.raises(UnsupportedOptionError, match=attribute):
        session_options(theirs, None)


def test_onnxruntime_config_entry_that_cannot_be_kept():
    theirs = onnxruntime.SessionOptions()
    theirs.add_session_config_entry("session.set_denormal_as_zero", "1")
    with pytest.raises(UnsupportedOptionError, match="set_denormal_as_zero"):
        session_options(theirs, None)


def test_public_names_are_those_of_the_package():
    assert outrider.SessionOptions is SessionOptions
    assert outrider.ProviderSpec is ProviderSpec
    with pytest.raises(AttributeError, match="InferenceSession"):
        outrider.Inference  # noqa: B018


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70), st.floats(allow_nan=True), st.sampled_from(["", "all", "none", "x"]),
    st.dictionaries(st.sampled_from(["N", "optimization", "spin_us", "session.load_model_format"]),
                    st.sampled_from([1, 0, "none", "ONNX", "7"]), max_size=2),
    st.sampled_from([*ExecutionMode, *ExecutionOrder]),
)  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.sampled_from([(SessionOptions, one.name) for one in dataclasses.fields(SessionOptions)]
                    + [(RunOptions, one.name) for one in dataclasses.fields(RunOptions)]),
    VALUES,
)  # fmt: skip
def test_assignment_is_checked_as_the_constructor_checks(what, value):
    kind, name = what
    options = kind()
    try:
        made = kind(**{name: value})
    except OutriderError as error:
        with pytest.raises(type(error)) as caught:
            setattr(options, name, value)
        assert str(caught.value) == str(error)
        assert options == kind()
    else:
        setattr(options, name, value)
        assert options == made
        assert pickle.loads(pickle.dumps(made)) == made == made.fixed()


def test_assignment_of_what_options_do_not_have():
    options = SessionOptions()
    with pytest.raises(UnknownOptionError, match="Did you mean max_in_flight"):
        options.max_inflight = 3
    with pytest.raises(AttributeError, match="not deleted"):
        del options.spares
    options.max_in_flight = 3
    options.pins = {"a": "cpu"}
    assert repr(options) == "SessionOptions(max_in_flight=3, pins={'a': 'cpu'})"
    assert options != SessionOptions()


def test_terminate_serves_a_token():
    limits = RunOptions()
    first = limits.terminator
    limits.terminate = True
    assert first.cancelled
    limits.logid = "still"
    assert limits.terminator is first
    limits.terminate = False
    assert not limits.terminator.cancelled
    assert RunOptions(terminate=True).terminator.cancelled


def test_external_folder_of_onnxruntime_is_base_dir(tmp_path):
    key = "session.model_external_initializers_file_folder_path"
    assert SessionOptions(config={key: str(tmp_path)}).base_dir == str(tmp_path)
    with pytest.raises(InvalidOptionError, match="base_dir"):
        SessionOptions(config={key: str(tmp_path)}, base_dir="/")
    with pytest.raises(InvalidOptionError, match="existing folder"):
        SessionOptions(config={key: "/no/such/folder"})
