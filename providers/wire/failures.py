"""Failures and their stories: what a failed node raises, and errors as plain data that crosses processes."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from outrider.providers.wire.dtypes import onnx_name
from outrider.providers.wire.errors import KernelError
from outrider.providers.wire.graph import Node, Value
from outrider.shm import memory
from outrider.shm.errors import OutOfMemoryError, OutriderError

_PLAIN = (str, int, float, bool, type(None))


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value)


def error_to_plain(error: BaseException) -> dict[str, Any]:
    """`{type, message, fields, traceback}` of any exception; only an OutriderError has fields."""
    story = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    fields = {name: _plain(value) for name, value in error.fields().items()} if isinstance(error, OutriderError) else {}
    return {"type": type(error).__name__, "message": str(error), "fields": fields, "traceback": story[-65536:]}


def error_from_plain(plain: dict[str, Any], kinds: Iterable[type[OutriderError]]) -> OutriderError | None:
    """The error again, when its type is one of `kinds`; None for a type that is not ours."""
    for kind in kinds:
        if kind.__name__ == plain.get("type"):
            fields = plain.get("fields")
            known = {k: v for k, v in fields.items() if k in kind._fields} if isinstance(fields, dict) else {}
            return kind(str(plain.get("message")), **known)
    return None


def fail(nodes: Sequence[Node], values: Sequence[Value], items: Sequence[Any], cause: BaseException) -> NoReturn:
    """One story for kernels of the cpu provider and for anyone's callable.

    Raises Outrider's own errors as they are, short memory as OutOfMemoryError, the rest as KernelError.
    `nodes`: the node that failed, or all of a unit that runs as one. `values` and `items`: its inputs as declared and
    as they came (missing ones were omitted). The provider's name is filled in by the coordinator, which knows it.
    """
    if isinstance(cause, OutriderError):
        raise cause
    one = nodes[0] if len(nodes) == 1 else None
    if one:
        what = f"node {one.name} ({one.label}, opset {one.opset})"
    else:
        what = f"the unit of {first_names([node.name for node in nodes])}"
    if isinstance(cause, MemoryError):
        raise OutOfMemoryError(
            f"{what} ran out of memory: {cause}; use smaller inputs",
            value=nodes[0].name,
            available=memory.available_bytes(),
        ) from cause
    padded = [*items, *[None] * len(values)]
    described = [_describe(value, item) for value, item in zip(values, padded, strict=False)]
    listed = ", ".join(
        f"{one['name'] or '(omitted)'}: {one['dtype']}{'' if one['shape'] is None else one['shape']}"
        for one in described
    )
    reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    raise KernelError(
        f"{what} failed: {reason}; its inputs were {listed or 'none'}",
        node=nodes[0].name,
        op=one.label if one else None,
        opset=one.opset if one else None,
        inputs=described,
        cause=reason,
        remote_traceback="".join(traceback.format_exception(type(cause), cause, cause.__traceback__)),
    ) from cause


def first_names(names: Sequence[str]) -> str:
    """The first three names, for a message that need not list all."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _describe(value: Value, item: Any) -> dict[str, Any]:
    """name, dtype and shape of what arrived; the declared dtype where it is not a tensor."""
    dtype: str = value.dtype
    shape: list[int] | None = None
    if isinstance(item, np.ndarray):
        shape = list(item.shape)
        try:
            dtype = onnx_name(item.dtype)
        except ValueError:
            dtype = str(item.dtype)
    return {"name": value.name, "dtype": dtype, "shape": shape}
