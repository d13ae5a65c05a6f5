"""The two plugin libraries with execution providers that PyPI has for machines without a GPU, each where it can live.

`onnxruntime-ggml` pins an older onnxruntime, `nxrt-ep-cpu` works beside the newest: a virtual environment for each,
built at first use and cached (`environments.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.environments import environment
from tests.skips import pypi_is_unreachable


@dataclass(frozen=True)
class Plugin:
    """`ep`: the execution provider's name. `python`: the interpreter of an environment that has the `library`."""

    ep: str
    python: Path
    library: Path


def skip_if_unreachable() -> None:
    """Skip the test if the environments are not built yet and PyPI does not answer."""
    try:
        ggml(), nxrt()
    except RuntimeError:
        if pypi_is_unreachable():
            pytest.skip("PyPI cannot be reached")
        raise


@cache
def ggml() -> Plugin:
    """ggml as an execution provider. It keeps weights as float16, unless its option `weights` is `f32`."""
    requirements = ["onnxruntime-ggml==0.2.0", "onnxruntime==1.30.0", "numpy>=2"]
    return _plugin("ggml", requirements, "onnxruntime_ggml/lib/libonnxruntime_ggml.so")


@cache
def nxrt() -> Plugin:
    """The CPU provider of nxrt. It does convolutions for shapes that are known when it compiles."""
    requirements = ["nxrt-ep-cpu==0.1.0.dev6", "onnxruntime>=1.32", "numpy>=2"]
    return _plugin("cpu_ep", requirements, "nxrt_ep_cpu/libonnx_runtime_ep_cpu_plugin.so")


def _plugin(ep: str, requirements: Sequence[str], library: str) -> Plugin:
    python = environment(ep, requirements)
    (found,) = python.parent.parent.glob(os.path.join("lib", "python*", "site-packages", library))
    return Plugin(ep, python, found)
