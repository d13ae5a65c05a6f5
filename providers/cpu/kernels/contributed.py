"""What onnxruntime's optimiser writes for transformers in the domain com.microsoft: GELUs with a bias, normalizations
of a sum, embeddings. 16-bit floats are computed in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outrider.providers.cpu.kernels.activations import gelu, swish
from outrider.providers.cpu.kernels.blockwise import Program, blockwise, into, scalar_operand, takes
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.normalization import Extra, normalize_rows
from outrider.providers.cpu.kernels.precision import cast, finish, target, wide, widened
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node

_CONTRIBUTED = "com.microsoft"


def _bind_gelu(b: Bind, approximate: str, parameters: tuple[float, ...] = ()) -> None:
    """Gelu of x, or of x plus a bias along the last axis; 'swish' is x sigmoid(alpha x)."""
    x, bias = b.array(0), b.array(1) if b.has(1) else None
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"a bias {list(bias.shape)} does not fit an input {list(x.shape)}")
    dtype = wide(x.dtype)
    inputs = [cast(b, x, dtype)] if bias is None else [cast(b, x, dtype), widened(b, 1)]
    library = b.compiled("activation")
    if library is not None and takes(x.shape, inputs):
        name = {"none": "Gelu", "tanh": "GeluTanh", "swish": "Swish"}[approximate]
        program: Program = [("Add", 0, 1)] if bias is not None else []
        first = len(inputs) + len(parameters) if bias is not None else 0
        program = [*program, (name, first, *range(len(inputs), len(inputs) + len(parameters)))]
        operands = [*inputs, *(scalar_operand(value) for value in parameters)]
        if inputs[0] is x:
            blockwise(b, library, program, operands, 1)
            return
        y, total = b.out(0, x.shape, x.dtype), b.scratch(x.shape, dtype)
        into(b, library, program, operands, total)
        finish(b, y, total)
        return
    y = b.out(0, x.shape, x.dtype)
    total = target(b, y)
    argument = inputs[0]
    if bias is not None:
        argument = b.scratch(x.shape, dtype)
        b.step(np.add, inputs[0], inputs[1], argument)
    if approximate == "swish":
        swish(b, argument, total, (parameters[0],))
    else:
        gelu(b, argument, total, approximate)
    finish(b, y, total)


@kernel("Gelu", domain=_CONTRIBUTED, dtypes={0: FLOATS}, compiled="activation")
def plain_gelu(b: Bind, p: None) -> None:
    """com.microsoft Gelu: with erf."""
    _bind_gelu(b, "none")


@kernel("BiasGelu", domain=_CONTRIBUTED, dtypes={0: FLOATS, 1: FLOATS}, compiled="activation")
def bias_gelu(b: Bind, p: None) -> None:
    """com.microsoft BiasGelu: Gelu with erf of x + bias."""
    _bind_gelu(b, "none")


@kernel("FastGelu", domain=_CONTRIBUTED, dtypes={0: FLOATS}, compiled="activation")
def fast_gelu(b: Bind, p: None) -> None:
    """com.microsoft FastGelu: Gelu with tanh of x, or of x + bias."""
    _bind_gelu(b, "tanh")


def _parse_alpha(node: Node) -> float:
    return float(node.attributes.get("alpha", 1.702))


@kernel("QuickGelu", domain=_CONTRIBUTED, dtypes={0: FLOATS}, parse=_parse_alpha, compiled="activation")
def quick_gelu(b: Bind, p: float) -> None:
    """com.microsoft QuickGelu: x sigmoid(alpha x)."""
    _bind_gelu(b, "swish", (p,))


# Normalizations ------------------------------------------------------------------------------------------------------
def _parse_skip(node: Node) -> float:
    return float(node.attributes.get("epsilon", 1e-12))


def _bind_skip(b: Bind, epsilon: float, bias: int | None, skip_bias: int, simple: bool) -> None:
    """Normalization of x + skip + skip bias. Outputs: y, mean, 1 / deviation, and the sum that was normalized.

    `bias` and `skip_bias`: positions of those inputs.
    """
    x, skip = b.array(0), b.array(1)
    rows, n, turns = math.prod(x.shape[:-1]), x.shape[-1], math.prod(skip.shape[:-1])
    tail = skip.shape[1:] if skip.shape[0] == 1 else skip.shape
    if skip.ndim < 2 or tail != x.shape[x.ndim - len(tail) :]:
        raise ValueError(f"a skip {list(skip.shape)} does not fit an input {list(x.shape)}")
    y, sums = b.out(0, x.shape, x.dtype), b.out(3, x.shape, x.dtype) if b.wanted(3) else None
    place, total = target(b, y), None if sums is None else target(b, sums)
    dtype = place.dtype
    mean, inverse = (b.scratch((rows, 1), dtype) if b.wanted(i) else None for i in (1, 2))
    extra = Extra(
        b.reshaped(widened(b, 1), (turns, n)),
        widened(b, skip_bias) if b.has(skip_bias) else None,
        None if total is None else total.reshape(rows, n),
        mean,
        inverse,
        simple,
    )
    shift = widened(b, bias) if bias is not None and b.has(bias) else None
    flat = b.reshaped(cast(b, x, dtype), (rows, n))
    normalize_rows(b, flat, place.reshape(rows, n), widened(b, 2), shift, epsilon, extra)
    finish(b, y, place)
    if sums is not None and total is not None:
        finish(b, sums, total)
    for i, value in ((1, mean), (2, inverse)):
        if value is not None:
            b.step(np.copyto, b.out(i, (*x.shape[:-1], 1), np.float32).reshape(rows, 1), value, "unsafe")


@kernel("SkipLayerNormalization", domain=_CONTRIBUTED, dtypes={0: FLOATS}, parse=_parse_skip, compiled="norm")
def skip_layer_normalization(b: Bind, p: float) -> None:
    """com.microsoft SkipLayerNormalization: x, skip, gamma, beta?, bias? -> y, mean?, 1 / deviation?, sum?."""
    _bind_skip(b, p, 3, 4, simple=False)


@kernel("SkipSimplifiedLayerNormalization", domain=_CONTRIBUTED, dtypes={0: FLOATS}, parse=_parse_skip, compiled="norm")
def skip_simplified_layer_normalization(b: Bind, p: float) -> None:
    """com.microsoft SkipSimplifiedLayerNormalization: x, skip, gamma, bias? -> y, mean?, 1 / root?, sum?."""
    _bind_skip(b, p, None, 3, simple=True)


@dataclass(frozen=True)
class Embedding:
    """Attributes of EmbedLayerNormalization."""

    epsilon: float


def _parse_embedding(node: Node) -> Embedding:
    kind = int(node.attributes.get("mask_index_type", 0))
    if kind not in (0, 2):
        raise Unsupported(f"mask_index_type is {kind}")
    return Embedding(float(node.attributes.get("epsilon", 1e-12)))


def _embedded(
    tables: tuple[np.ndarray, ...], numbers: tuple[np.ndarray | None, ...], total: np.ndarray, part: np.ndarray
) -> None:
    """The sum of the rows of each table; without numbers the row is the position in the sequence."""
    total.fill(0)
    for table, chosen in zip(tables, numbers, strict=True):
        if chosen is None:
            np.add(total, table[: total.shape[1]], total)
            continue
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < len(table)):
            raise ValueError(f"embedding numbers from {chosen.min()} to {chosen.max()}, the table has {len(table)}")
        np.take(table, np.broadcast_to(chosen, total.shape[:2]), 0, part)
        np.add(total, part, total)


def _lengths(mask: np.ndarray, lengths: np.ndarray) -> None:
    np.copyto(lengths, (mask == 1).sum(1), "unsafe")


@kernel("EmbedLayerNormalization", domain=_CONTRIBUTED, dtypes={2: FLOATS}, parse=_parse_embedding, compiled="norm")
def embed_layer_normalization(b: Bind, p: Embedding) -> None:
    """com.microsoft EmbedLayerNormalization: the sum of word, position and segment embeddings, normalized.

    ids [N, S], segments? [N, S], word table, position table, segment table?, gamma, beta, mask? [N, S], positions?
    -> y [N, S, H], mask index [N] (how many ones the mask has), sum? [N, S, H].
    """
    ids = b.array(0)
    word = widened(b, 2)
    shape = (*ids.shape, word.shape[1])
    rows, n = math.prod(ids.shape), word.shape[1]
    if not b.has(8) and ids.shape[1] > b.array(3).shape[0]:
        raise ValueError(f"{ids.shape[1]} positions, the table has {b.array(3).shape[0]}")
    tables, numbers = [word, widened(b, 3)], [ids, b.array(8) if b.has(8) else None]
    if b.has(4):
        tables.append(widened(b, 4))
        numbers.append(b.array(1))
    y, sums = b.out(0, shape, b.array(2).dtype), b.out(2, shape, b.array(2).dtype) if b.wanted(2) else None
    place = target(b, y)
    total = b.scratch(shape, place.dtype) if sums is None else target(b, sums)
    b.step(_embedded, tuple(tables), tuple(numbers), total, b.scratch(shape, place.dtype))
    flat, out = total.reshape(rows, n), place.reshape(rows, n)
    normalize_rows(b, flat, out, widened(b, 5), widened(b, 6), p.epsilon)
    finish(b, y, place)
    if sums is not None:
        finish(b, sums, total)
    if b.wanted(1):
        lengths = b.out(1, ids.shape[:1], np.int32)
        if b.has(7):
            b.step(_lengths, b.array(7), lengths)
        else:
            b.step(lengths.fill, 0)
