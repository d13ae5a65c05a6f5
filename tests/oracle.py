"""Results that are not ours: onnxruntime with graph optimisation off and one thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from outrider.tools.agree import agree


def run_ort(model: bytes | str | Path, feeds: Mapping[str, Any], outputs: list[str] | None = None) -> dict[str, Any]:
    """Output name -> value, from ONNX Runtime's CPU provider as the model is written. Nothing is cached."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    source = model if isinstance(model, bytes) else str(model)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = outputs or [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def assert_agree(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], tolerance: float) -> None:
    """Fails with the name of every output that differs, and how."""
    assert list(ours) == list(theirs)
    reasons = {name: agree(ours[name], theirs[name], tolerance) for name in theirs}
    wrong = {name: reason for name, reason in reasons.items() if reason is not None}
    assert not wrong, "\n".join(f"{name}: {reason}" for name, reason in wrong.items())
