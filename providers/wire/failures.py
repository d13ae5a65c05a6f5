"""Failures and their stories: what a failed node raises, and errors as plain data that crosses processes."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from outrider.providers.wire.dtypes import onnx_name
from outrider.providers.wire.errors import KernelError
from outrider.providers.wire.graph import Node, Value
from outrider.shm import memory
from outrider.shm.errors import OutOfMemoryError, OutriderError


def text_of(value: Any) -> str:
    """`str(value)` of whatever a provider may hand over: what has no text, or none that UTF-8 can carry, included."""
    try:
        text = str(value)
    except Exception as error:  # anyone's __str__
        text = f"{type(value).__name__} without text: its __str__ raised {type(error).__name__}"
    return text.encode(errors="backslashreplace").decode()


def plain(value: Any) -> Any:
    """`value` in the types that a message can carry; what has no such form becomes its text."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, Mapping):
        return {text_of(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return text_of(value)


def error_to_plain(error: BaseException) -> dict[str, Any]:
    """`{type, message, fields, traceback}` of any exception; only an OutriderError has fields."""
    story = text_of("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    fields = {name: plain(value) for name, value in error.fields().items()} if isinstance(error, OutriderError) else {}
    return {
        "type": text_of(type(error).__name__),
        "message": text_of(error),
        "fields": fields,
        "traceback": story[-65536:],
    }


def error_from_plain(told: dict[str, Any], kinds: Iterable[type[OutriderError]]) -> OutriderError | None:
    """The error again, when its type is one of `kinds`; None for a type that is not ours."""
    for kind in kinds:
        if kind.__name__ == told.get("type"):
            fields = told.get("fields")
            known = {k: v for k, v in fields.items() if k in kind._fields} if isinstance(fields, dict) else {}
            return kind(str(told.get("message")), **known)
    return None


def fail(
    nodes: Sequence[Node],
    values: Sequence[Value],
    items: Sequence[Any],
    cause: BaseException,
    fused: Sequence[Node] = (),
) -> NoReturn:
    """One story for kernels of the cpu provider and for anyone's callable.

    Raises Outrider's own errors as they are, short memory as OutOfMemoryError, the rest as KernelError.
    `nodes`: the node that failed, or all of a unit that runs as one. `values` and `items`: its inputs as declared and
    as they came (missing ones were omitted). `fused`: nodes that run as one with it. The provider's name is filled in
    by the coordinator, which knows it.
    """
    if isinstance(cause, OutriderError):
        try:
            raise cause
        finally:
            del cause  # or this frame, which the traceback holds, would hold it: a cycle around all that the run had
    one = nodes[0] if len(nodes) == 1 else None
    if one:
        what = f"node {one.name} ({one.label}, opset {one.opset})"
        if fused:
            what += f", into which {first_names([node.name for node in fused])} were fused,"
    else:
        what = f"the unit of {first_names([node.name for node in nodes])}"
    if isinstance(cause, MemoryError):
        raise OutOfMemoryError(
            f"{what} ran out of memory: {text_of(cause)}; use smaller inputs",
            value=nodes[0].name,
            available=memory.available_bytes(),
        ) from cause
    padded = [*items, *[None] * len(values)]
    described = [_describe(value, item) for value, item in zip(values, padded, strict=False)]
    listed = ", ".join(
        f"{one['name'] or '(omitted)'}: {one['dtype']}{'' if one['shape'] is None else one['shape']}"
        for one in described
    )
    said = text_of(cause)
    reason = f"{type(cause).__name__}: {said}" if said else type(cause).__name__
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
