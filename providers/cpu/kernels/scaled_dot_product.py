"""ONNX's Attention (scaled dot products of queries and keys, with a cache) and the rotary positions before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.precision import cast, finish, target, wide
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node

_FLOAT_NUMBERS = (0, 1, 10, 11, 16)  # of TensorProto; 0: as the input
_DOUBLE = 11


@dataclass(frozen=True)
class Attending:
    """Attributes of Attention. Heads are 0 and `scale` is None where omitted; windows are -1 where unbounded."""

    causal: bool
    heads: int
    key_heads: int
    scale: float | None
    softcap: float
    shown: int
    double: bool
    left: int
    right: int


def _parse(node: Node) -> Attending:
    get = node.attributes.get
    precision, shown, scale = int(get("softmax_precision", 0)), int(get("qk_matmul_output_mode", 0)), get("scale")
    if precision not in _FLOAT_NUMBERS:
        raise Unsupported(f"softmax_precision is {precision}, the kernel takes {_FLOAT_NUMBERS[1:]}")
    if not 0 <= shown <= 3:
        raise Unsupported(f"qk_matmul_output_mode is {shown}, ONNX has 0 to 3")
    return Attending(
        bool(get("is_causal", 0)),
        int(get("q_num_heads", 0)),
        int(get("kv_num_heads", 0)),
        None if scale is None else float(scale),
        float(get("softcap", 0.0)),
        shown,
        precision == _DOUBLE,
        int(get("left_window_size", -1)),
        int(get("right_window_size", -1)),
    )


def _by_heads(b: Bind, x: np.ndarray, heads: int) -> np.ndarray:
    """[N, heads, T, size] of that, or of [N, T, heads * size]."""
    if x.ndim == 4:
        return x
    if x.ndim != 3 or not heads or x.shape[2] % heads:
        raise ValueError(f"an input is {list(x.shape)}, with {heads} heads")
    return b.reshaped(x, (*x.shape[:2], heads, x.shape[2] // heads)).transpose(0, 2, 1, 3)


def _cached(b: Bind, i: int, past: np.ndarray | None, x: np.ndarray) -> np.ndarray:
    """Past and present along the axis of time, as output i where it is wanted."""
    if past is None and not b.wanted(i):
        return x
    before = past.shape[2] if past is not None else 0
    shape = (*x.shape[:2], before + x.shape[2], x.shape[3])
    both = b.out(i, shape, x.dtype) if b.wanted(i) else b.scratch(shape, x.dtype)
    if past is not None:
        b.step(np.copyto, both[:, :, :before], past)
    b.step(np.copyto, both[:, :, before:], x)
    return both


def _bias(
    shape: tuple[int, int], mask: np.ndarray | None, lengths: np.ndarray | None, past: int, p: Attending, dtype: Any
) -> np.ndarray:
    """What is added to the scores [..., T, S]: the mask, and minus infinity for keys that a query may not see."""
    steps, total = shape
    minus = dtype.type(-np.inf)
    bias = np.zeros(shape, dtype)
    if mask is not None:
        short = total - mask.shape[-1]
        if short > 0:
            hidden = False if mask.dtype == bool else minus
            mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=hidden)
        bias = bias + (np.where(mask, dtype.type(0), minus) if mask.dtype == bool else mask.astype(dtype))
    keys = np.arange(total)
    if p.causal or p.left >= 0 or p.right >= 0:
        # A query's place among the keys: behind the past, or so that the last query is the last valid key.
        first = np.array(past) if lengths is None else (lengths.reshape(-1, 1, 1, 1) - steps)
        ahead = keys - (np.arange(steps)[:, None] + first)
        seen = np.ones_like(ahead, bool)
        if p.causal:
            seen &= ahead <= 0
        if p.left >= 0:
            seen &= ahead >= -p.left
        if p.right >= 0:
            seen &= ahead <= p.right
        bias = bias + np.where(seen, dtype.type(0), minus)
    if lengths is not None:
        bias = bias + np.where(keys < lengths.reshape(-1, 1, 1, 1), dtype.type(0), minus)
    return bias


def _softmax(scores: np.ndarray) -> None:
    """In place along the last axis; a row of minus infinities becomes zeros."""
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    np.subtract(scores, np.where(np.isneginf(top), scores.dtype.type(0), top), scores)
    np.exp(scores, scores)
    total = scores.sum(-1, keepdims=True)
    np.divide(scores, np.where(total == 0, scores.dtype.type(1), total), scores)


@dataclass(frozen=True)
class _Inputs:
    """q [N, key heads, sharing, T, size], k and v [N, key heads, 1, S, size], as they lie in each run."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None
    lengths: np.ndarray | None
    past: int


def _attend(x: _Inputs, p: Attending, scale: float, y: np.ndarray, shown: np.ndarray | None) -> None:
    """y [N, key heads, sharing, T, value size]; `shown` [N, heads, T, S] gets the scores at the stage `p.shown`."""
    q, k = x.q * x.q.dtype.type(scale), x.k * x.k.dtype.type(scale)
    scores = np.matmul(q, k.swapaxes(-1, -2))
    by_head = scores.reshape(scores.shape[0], -1, *scores.shape[3:])  # a view: matmul's result is C-contiguous

    def show(stage: int) -> None:
        if shown is not None and p.shown == stage:
            np.copyto(shown, by_head, "unsafe")

    show(0)
    if p.softcap > 0:
        np.multiply(np.tanh(scores / scores.dtype.type(p.softcap)), scores.dtype.type(p.softcap), scores)
    show(1)
    shape = (scores.shape[3], scores.shape[4])
    np.add(by_head, _bias(shape, x.mask, x.lengths, x.past, p, scores.dtype), by_head)
    show(2)
    if p.double and scores.dtype != np.float64:
        precise = scores.astype(np.float64)
        _softmax(precise)
        np.copyto(scores, precise, "unsafe")
    else:
        _softmax(scores)
    show(3)
    np.matmul(scores, x.v, y)


@kernel("Attention", since=23, dtypes={0: FLOATS, 1: FLOATS, 2: FLOATS}, parse=_parse)
def attention(b: Bind, p: Attending) -> None:
    """Attention-24: softmax(q @ k' * scale + mask) @ v per head, with a cache of keys and values.

    q [N, H, T, size] or [N, T, H * size], k and v with G heads (H a multiple of G) of S keys, past [N, G, P, size];
    y as q, present [N, G, P + S, size]. Vaswani et al., 2017; grouped queries: Ainslie et al., 2023. ValueError where
    shapes do not fit.
    """
    inputs = [b.array(i) for i in range(3)]
    dtype = wide(inputs[0].dtype)
    q, k, v = (_by_heads(b, x, p.key_heads if i else p.heads) for i, x in enumerate(inputs))
    past = [b.array(i) if b.has(i) else None for i in (4, 5)]
    k, v = _cached(b, 1, past[0], k), _cached(b, 2, past[1], v)
    rows, heads, steps, size = q.shape
    groups = k.shape[1]
    if v.shape[1] != groups or heads % groups or k.shape[3] != size or v.shape[2] != k.shape[2]:
        raise ValueError(f"queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} do not fit")

    def dense(x: np.ndarray, shared: int) -> np.ndarray:
        x = b.contiguous(cast(b, x, dtype))
        return x.reshape(rows, groups, shared, *x.shape[2:])

    given = _Inputs(
        dense(q, heads // groups),
        dense(k, 1),
        dense(v, 1),
        b.array(3) if b.has(3) else None,
        b.array(6) if b.has(6) else None,
        past[0].shape[2] if past[0] is not None else 0,
    )
    width = v.shape[3]
    y = b.out(0, (rows, heads, steps, width) if inputs[0].ndim == 4 else (rows, steps, heads * width), inputs[0].dtype)
    computed = target(b, y) if inputs[0].ndim == 4 else b.scratch((rows, heads, steps, width), dtype)
    shown = b.out(3, (rows, heads, steps, k.shape[2]), inputs[0].dtype) if b.wanted(3) else None
    scale = (size**-0.5 if p.scale is None else p.scale) ** 0.5
    b.step(_attend, given, p, scale, computed.reshape(rows, groups, heads // groups, steps, width), shown)
    if inputs[0].ndim == 4:
        finish(b, y, computed)
    else:
        b.step(np.copyto, y.reshape(rows, steps, heads, width), computed.transpose(0, 2, 1, 3), "unsafe")


# Rotary positions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rotation:
    """Attributes of RotaryEmbedding; 0 where omitted."""

    heads: int
    size: int
    interleaved: bool


def _parse_rotation(node: Node) -> Rotation:
    get = node.attributes.get
    return Rotation(int(get("num_heads", 0)), int(get("rotary_embedding_dim", 0)), bool(get("interleaved", 0)))


def _rotate(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, places: np.ndarray | None, p: Rotation, y: np.ndarray
) -> None:
    """x, y [N, heads, T, size]; cos, sin [positions, half] with places [N, T], or [N, T, half]."""
    if places is not None:
        if places.size and (places.min() < 0 or places.max() >= cos.shape[0]):
            raise IndexError(f"a position is outside the {cos.shape[0]} that cosines are given for")
        cos, sin = cos[places], sin[places]
    cos, sin = (one[:, None].astype(x.dtype, copy=False) for one in (cos, sin))
    half = cos.shape[-1]
    if p.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    np.copyto(y[..., first], cos * x[..., first] - sin * x[..., second], "unsafe")
    np.copyto(y[..., second], sin * x[..., first] + cos * x[..., second], "unsafe")
    np.copyto(y[..., 2 * half :], x[..., 2 * half :], "unsafe")


@kernel("RotaryEmbedding", since=23, dtypes={0: FLOATS}, parse=_parse_rotation)
def rotary_embedding(b: Bind, p: Rotation) -> None:
    """RotaryEmbedding-23: pairs of elements turned by the angle of their position (Su et al., RoFormer, 2021).

    x [N, heads, T, size] or [N, T, heads * size]; the first `rotary_embedding_dim` elements are turned, all if omitted.
    """
    x = b.array(0)
    y = b.out(0, x.shape, x.dtype)
    source, place = _by_heads(b, x, p.heads), y
    if x.ndim == 3:
        place = y.reshape(*x.shape[:2], p.heads, x.shape[2] // p.heads).transpose(0, 2, 1, 3)
    half = (p.size or source.shape[3]) // 2
    cos, sin = b.array(1), b.array(2)
    if cos.shape[-1] != half or sin.shape != cos.shape:
        raise ValueError(f"cosines are {list(cos.shape)} and sines {list(sin.shape)}, with {half} angles per position")
    places = b.array(3) if b.has(3) else None
    b.step(_rotate, cast(b, source, wide(x.dtype)), cos, sin, places, p, place)
