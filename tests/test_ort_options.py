"""Options of the `ort` provider, and the choice of an execution provider, without a worker."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outrider.providers.contract import ProviderUnavailableError
from outrider.providers.ort import library
from outrider.providers.ort.options import OrtOptions, parse_options

pytestmark = pytest.mark.fast

EP = "SomeExecutionProvider"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"libary": "x"}, "did you mean 'library'"),
        ({"device_id": "0"}, "CPU provider has no option 'device_id'; it has library"),
        ({"library": "/nowhere/libep.so"}, "there is no file /nowhere/libep.so"),
        ({"registration": "foo"}, "say 'library' too"),
        ({"cpu_fallback": "maybe"}, "'cpu_fallback' of ort is true or false, not 'maybe'"),
        ({"custom_ops": 3}, "'custom_ops' of ort is a list of texts"),
        ({"session": "x"}, "'session' of ort is a dict"),
        ({"session.enable_mem_patern": "1"}, "did you mean 'enable_mem_pattern'"),
        ({"session.intra_op.allow_spinnin": "1"}, "did you mean 'intra_op.allow_spinning'"),
        ({"session.use_per_session_threads": "1"}, "threads of its own"),
        ({"session": {"session.model_external_initializers_file_folder_path": "/x"}}, "where the model says"),
        ({"session.log_severity_level": True}, "is a number, not True"),
        ({"session": {"enable_mem_patern": True}}, "did you mean 'enable_mem_pattern'"),
        ({"session": {"graph_optimization_level": 1}}, "SessionOptions(optimization=...)"),
        ({"session": {"intra_op_num_threads": 1}}, "ProviderSpec(threads=...)"),
        ({"session.disable_cpu_ep_fallback": "1"}, "required='all'"),
        ({"session.execution_mode": "fast"}, "one of sequential, parallel, not 'fast'"),
        ({"session.inter_op_num_threads": "many"}, "is a number, not 'many'"),
        ({"session.enable_mem_reuse": "2"}, "true or false"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ProviderUnavailableError) as caught:
        parse_options(given, own_cpu=True)
    assert told in str(caught.value)
    assert caught.value.provider == "ort"


def test_options_of_the_session() -> None:
    given = {
        "session": {"enable_mem_pattern": False, "session.set_denormal_as_zero": True},
        "session.execution_mode": "PARALLEL",
        "session.intra_op.allow_spinning": "1",
        "session.ep.context_enable": 1,
        "session.inter_op_num_threads": "2",
        "session.not.yet.known": "x",
    }
    found = parse_options(given, own_cpu=True)
    assert found.attributes == {"enable_mem_pattern": False, "execution_mode": "parallel", "inter_op_num_threads": 2}
    assert found.entries == {
        "session.set_denormal_as_zero": "1",
        "session.intra_op.allow_spinning": "1",
        "ep.context_enable": "1",
        "session.not.yet.known": "x",
    }


def test_other_options_go_to_the_execution_provider_as_text() -> None:
    found = parse_options({"device_id": 1, "fast": True, "cache": "/x", "ratio": 0.5}, own_cpu=False)
    assert found.provider == {"device_id": "1", "fast": "1", "cache": "/x", "ratio": "0.5"}
    for given, told in (({"libary": "x"}, "did you mean 'library'"), ({"shape": [1]}, "as text; [1] is none")):
        with pytest.raises(ProviderUnavailableError, match=told.replace("[", r"\[")):
            parse_options(given, own_cpu=False)


def test_lists_may_be_text(tmp_path: Path) -> None:
    one, two = tmp_path / "one.so", tmp_path / "two.so"
    one.touch()
    two.touch()
    found = parse_options({"custom_ops": f"{one},{two}", "exclude": "Conv, com.microsoft::Gelu"}, own_cpu=True)
    assert found.custom_ops == (str(one), str(two))
    assert found.exclude == {"ai.onnx::Conv", "com.microsoft::Gelu"}


# The execution provider ----------------------------------------------------------------------------------------------
@dataclass
class Device:
    ep_name: str
    number: int = 0


@dataclass
class Package:
    """What `choose` uses of onnxruntime. `offers`: the devices of a plugin library."""

    offers: list[Device] = field(default_factory=list)
    known: list[Device] = field(default_factory=list)
    registered: list[tuple[str, str]] = field(default_factory=list)
    refusal: str = ""
    __version__: str = "1.30.0"

    def get_available_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", "OddExecutionProvider", library.CPU]

    def get_ep_devices(self) -> list[Device]:
        return self.known

    def register_execution_provider_library(self, registration: str, path: str) -> None:
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.registered.append((registration, path))
        self.known = [*self.known, *self.offers]


def options(**given: Any) -> OrtOptions:
    return OrtOptions(**given)


def test_built_in_execution_providers() -> None:
    assert library.choose(Package(), "", 0, options()).own_cpu
    assert library.choose(Package(), library.CPU, 2, options()).own_cpu
    first = library.choose(Package(), "CUDAExecutionProvider", 0, options(provider={"x": "1"}))
    assert first.attach(None) == [("CUDAExecutionProvider", {"x": "1"}), library.CPU]
    assert library.choose(Package(), "CUDAExecutionProvider", 1, options()).options == {"device_id": "1"}
    assert library.choose(Package(), "OddExecutionProvider", 1, options()).options == {}


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("OpenVINOExecutionProvider", "pip install onnxruntime-openvino, best in an environment of its own"),
        ("NoExecutionProvider", "only CUDAExecutionProvider, OddExecutionProvider, CPUExecutionProvider; a plugin"),
    ],
)
def test_an_execution_provider_that_is_not_there(part: str, told: str) -> None:
    with pytest.raises(ProviderUnavailableError) as caught:
        library.choose(Package(), part, 0, options())
    assert told in str(caught.value)


def test_a_plugin_library_is_registered_under_the_name_that_is_given() -> None:
    for given, part, name in (({"registration": "mine"}, EP, "mine"), ({}, EP, EP), ({}, "", "ep")):
        package = Package([Device(EP)])
        chosen = library.choose(package, part, 0, options(library="/x/libep.so", **given))
        assert package.registered == [(name, "/x/libep.so")]
        assert (chosen.name, chosen.devices) == (EP, (Device(EP),))


def test_an_instance_takes_the_device_of_its_number() -> None:
    two = [Device(EP, 0), Device("Other", 0), Device(EP, 1)]
    assert library.choose(Package(two), EP, 1, options(library="/x.so")).devices == (Device(EP, 1),)
    assert library.choose(Package(two[:2]), EP, 5, options(library="/x.so")).devices == (Device(EP, 0),)
    with pytest.raises(ProviderUnavailableError, match="has 2 devices, 0 to 1; there is none of number 2"):
        library.choose(Package(two), EP, 2, options(library="/x.so"))


@pytest.mark.parametrize(
    ("package", "part", "told"),
    [
        (Package([]), "", "offers no device here"),
        (Package([Device("A"), Device("B")]), "", "several execution providers, A, B"),
        (Package([Device("A")]), "B", "no execution provider 'B', only A"),
        (Package(refusal="[ONNXRuntimeError] : 1 : FAIL : no such symbol"), "", "as 'x': no such symbol"),
    ],
)
def test_a_plugin_library_that_does_not_do(package: Package, part: str, told: str) -> None:
    with pytest.raises(ProviderUnavailableError) as caught:
        library.choose(package, part, 0, options(library="/x.so"))
    assert told in str(caught.value)


def test_custom_operators_must_load(tmp_path: Path) -> None:
    nothing = tmp_path / "ops.so"
    nothing.write_bytes(b"no library")
    with pytest.raises(ProviderUnavailableError) as caught:
        library.check_custom_ops(library.onnxruntime(), [str(nothing)])
    assert f"cannot load the custom operators of {nothing}" in str(caught.value)
    library.check_custom_ops(library.onnxruntime(), [])


def test_onnxruntime_must_be_there_and_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ProviderUnavailableError, match="pip install onnxruntime there"):
        library.onnxruntime()
    old = ModuleType("onnxruntime")
    old.__version__ = "1.23.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime", old)
    with pytest.raises(ProviderUnavailableError, match=r"onnxruntime 1\.23\.2 .* install 1\.24 or newer"):
        library.onnxruntime()


def test_what_onnxruntime_says_in_short() -> None:
    text = (
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Mul node. Name:'m' "
        "Status Message: /onnxruntime_src/onnxruntime/core/providers/cpu/math/element_wise_ops.h:583 "
        "void onnxruntime::Append(int, int) axis == 1 was false.\n"
    )
    told = library.said(RuntimeError(text))
    assert told == ("axis == 1 was false.")
    assert len(library.said(RuntimeError("x" * 1000), 100)) == 100
