"""Outputs that no worker makes: the model passes an input, an initializer or a constant on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import onnx_name
from outrider.providers.wire.graph import TensorRef
from outrider.scheduler.inplace import Array, Targets, check_target
from outrider.scheduler.model import LoadedModel
from outrider.scheduler.replica import Slot


class PassedOn:
    """Those of one model. `defaults`: what its initializers hold that may be fed."""

    def __init__(self, loaded: LoadedModel, defaults: Mapping[str, Any]) -> None:
        self._loaded = loaded
        self._defaults = defaults

    def bound(
        self, slot: Slot, targets: Targets, wanted: Sequence[str], feeds: Mapping[str, Any]
    ) -> dict[str, tuple[Array | None, Any]]:
        """Their targets (None: the caller's own), and what they will be after the run that begins now in `slot`."""
        generation = slot.replica.generation
        passed: dict[str, tuple[Array | None, Any]] = {}
        for name in wanted:
            if generation is None or name in generation.outputs:
                continue
            target = targets.arrays.get(name)
            if target is None:
                passed[name] = None, self.copied(name, feeds)  # now: the run may write over it
                continue
            value = np.asarray(self._value(name, feeds))
            check_target(name, target, onnx_name(value.dtype), value.shape)
            if any(np.may_share_memory(value, other) for other in targets.arrays.values()):
                value = value.copy()  # the run may write over it
            passed[name] = target, value
        return passed

    def copied(self, name: str, feeds: Mapping[str, Any]) -> Any:
        """One of them, as a copy."""
        value = self._value(name, feeds)
        return np.array(value, order="C") if isinstance(value, np.ndarray) else copy.deepcopy(value)

    def _value(self, name: str, feeds: Mapping[str, Any]) -> Any:
        if name in feeds:
            return feeds[name]
        if name in self._defaults:
            return self._defaults[name]
        ref = self._loaded.graph.constants[name]
        assert isinstance(ref, TensorRef)
        return self._loaded.store.read(ref)
