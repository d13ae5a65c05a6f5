"""Matrix products: MatMul, Gemm and Einsum. Operands of 16 bits are multiplied in float32 and rounded once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.enlarged import with_larger_residual
from outrider.providers.cpu.kernels.epilogue import (
    Epilogue,
    activate,
    epilogue,
    finish_product,
    parse_epilogue,
    scale,
)
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.panels import Operands, operands, padded_features
from outrider.providers.cpu.kernels.precision import finish, target, widened
from outrider.providers.cpu.kernels.products import multiply_compiled
from outrider.providers.wire.dtypes import FLOATS, NUMBERS
from outrider.providers.wire.graph import Node

_PRODUCTS = FLOATS | {"int32", "int64", "uint32", "uint64"}


def product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of numpy.matmul. Raises ValueError with both shapes when they do not fit."""
    left, right = (1,) + a if len(a) == 1 else a, b + (1,) if len(b) == 1 else b
    if not a or not b or left[-1] != right[-2]:
        raise ValueError(f"shapes {list(a)} and {list(b)} have no matrix product")
    batch = left[:-2] if right[:-2] in ((), left[:-2]) else np.broadcast_shapes(left[:-2], right[:-2])
    return batch + left[-2 : -1 if len(a) > 1 else -2] + (right[-1:] if len(b) > 1 else ())


def multiply(b: Bind, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """Record y = x @ w, in the one dtype that all three have; many rows against one matrix are one GEMM.

    Where BLAS would be called in another way for other strides (one row, one column: GEMV), the operands are copied:
    strides must not show in the last bits of the result.
    """
    if not y.size:
        return
    if not x.size:
        b.step(y.fill, 0)
        return
    if x.ndim == 1 or w.ndim == 1 or x.shape[-2] == 1 or w.shape[-1] == 1:
        x, w = b.contiguous(x), b.contiguous(w)
    if x.ndim > 2 and w.ndim == 2:
        rows = math.prod(x.shape[:-1])
        x = b.contiguous(x)
        x, y = x.reshape(rows, x.shape[-1]), y.reshape(rows, w.shape[1])
    b.step(np.matmul, x, w, y)


@dataclass(frozen=True)
class Product:
    """Attributes of a fused product. `left`, `right`: the operand's last two axes are swapped; `left_batch`,
    `right_batch`: its first axis stands between the batch and the last (`transBatchA` of FusedMatMul)."""

    epilogue: Epilogue
    left: bool = False
    right: bool = False
    left_batch: bool = False
    right_batch: bool = False


def _operand(x: np.ndarray, swapped: bool, batch: bool) -> np.ndarray:
    if x.ndim < 2:
        return x  # as onnxruntime: a vector is never transposed
    if batch:
        x = np.moveaxis(x, 0, -2)
    return x.swapaxes(-1, -2) if swapped else x


def _parse_own(node: Node) -> Product:
    get = node.attributes.get
    fused = parse_epilogue(node, float(get("factor", 1.0)))
    return Product(fused, bool(get("transA", 0)), bool(get("transB", 0)))


def _parse_microsoft(node: Node) -> Product:
    get = node.attributes.get
    swaps = [bool(get(name, 0)) for name in ("transA", "transB", "transBatchA", "transBatchB")]
    return Product(Epilogue(factor=float(get("alpha", 1.0))), *swaps)


@kernel("MatMul", domain="outrider", dtypes={0: FLOATS, 1: FLOATS}, parse=_parse_own, compiled="gemm")
@kernel("FusedMatMul", domain="com.microsoft", dtypes={0: FLOATS, 1: FLOATS}, parse=_parse_microsoft, compiled="gemm")
@kernel("MatMul", dtypes={0: _PRODUCTS, 1: _PRODUCTS}, parse=lambda node: Product(Epilogue()), compiled="gemm")
def matmul(b: Bind, p: Product) -> None:
    """ONNX MatMul-13; `com.microsoft::FusedMatMul`; both with all of `epilogue.py` along the last axis."""
    x = _operand(widened(b, 0), p.left, p.left_batch)
    w = _operand(_matrix(b, not p.right_batch), p.right, p.right_batch)
    shape = product_shape(x.shape, w.shape)
    if with_larger_residual(b, matmul, p, shape, -1 % max(1, len(shape))):
        return
    y = b.out(0, shape, b.array(0).dtype)
    total = target(b, y)
    library = b.compiled("gemm")
    if library is not None and _is_for_c(x, w, total):
        with_, swapped = operands(b, p.epilogue, w.shape[-1]), None if p.right_batch else p.right
        multiply_compiled(b, library, x, w, total, p.epilogue, with_, swapped)
    else:
        if p.right and not p.right_batch:
            w = _laid_out(b, x, w)
        multiply(b, x, w, total)
        finish_product(b, total, p.epilogue, -1)
    finish(b, y, total)


def _is_for_c(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> bool:
    """True for what the compiled library takes: sums in float32, not empty, matrices."""
    return y.dtype == np.float32 and min(x.ndim, w.ndim) > 1 and min(x.size, w.size, y.size) > 0


def _matrix(b: Bind, packable: bool) -> np.ndarray:
    """Input 1 in the dtype to compute in; as it is where the compiled library packs it."""
    packed = packable and b.compiled("gemm") is not None and b.is_const(1) and min(x.ndim for x in b.inputs[:2]) > 1
    return b.array(1) if packed else widened(b, 1)


def _laid_out(b: Bind, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """`w`, the swapped input 1; if constant it is put into C order here, where `multiply` would do so in every run."""
    if w.ndim != 2 or not b.is_const(1) or not (x.ndim == 1 or x.shape[-2] == 1 or w.shape[1] == 1):
        return w
    dtype = w.dtype
    made: np.ndarray = b.packed("swapped", 1, lambda contents: np.ascontiguousarray(contents.T, dtype))
    return made


@dataclass(frozen=True)
class Scaled:
    """Attributes of Gemm and FusedGemm."""

    epilogue: Epilogue
    beta: float
    left: bool
    right: bool


def _parse_gemm(node: Node) -> Scaled:
    get = node.attributes.get
    alpha, beta = float(get("alpha", 1.0)), float(get("beta", 1.0))
    dtype = node.inputs[0].dtype
    if dtype not in FLOATS and not (alpha.is_integer() and beta.is_integer()):
        raise Unsupported(f"alpha {alpha} or beta {beta} with {dtype}")
    given = [get(name) for name in ("activation_alpha", "activation_beta")]
    parameters = [float(value) for value in given if value is not None]
    return Scaled(
        epilogue(str(get("activation", "")), parameters, factor=alpha),
        beta,
        bool(get("transA", 0)),
        bool(get("transB", 0)),
    )


@kernel("FusedGemm", domain="com.microsoft", dtypes={0: FLOATS, 1: FLOATS}, parse=_parse_gemm, compiled="gemm")
@kernel("Gemm", since=7, dtypes={0: _PRODUCTS, 1: _PRODUCTS}, parse=_parse_gemm, compiled="gemm")
def gemm(b: Bind, p: Scaled) -> None:
    """ONNX Gemm-13: alpha * A' @ B' + beta * C; `com.microsoft::FusedGemm`: an activation of that."""
    x, w = widened(b, 0), _matrix(b, True)
    if x.ndim != 2 or w.ndim != 2:
        raise ValueError(f"Gemm takes matrices, these are {list(x.shape)} and {list(w.shape)}")
    x, w = x.T if p.left else x, w.T if p.right else w
    y = b.out(0, product_shape(x.shape, w.shape), b.array(0).dtype)
    total = target(b, y)
    library = b.compiled("gemm")
    if library is not None and _is_for_c(x, w, total):
        with_ = _addend(b, p.beta, y.shape)
        fused = p.epilogue if with_.residual is None else replace(p.epilogue, residual="before")
        multiply_compiled(b, library, x, w, total, fused, with_, p.right)
        finish(b, y, total)
        return
    multiply(b, x, _laid_out(b, x, w) if p.right else w, total)
    scale(b, total, p.epilogue.factor)
    if b.has(2) and p.beta != 0:
        b.step(np.add, total, _times(b, widened(b, 2), p.beta), total)
    activate(b, total, p.epilogue)
    finish(b, y, total)


def _times(b: Bind, x: np.ndarray, factor: float) -> np.ndarray:
    if factor == 1:
        return x
    scaled = b.scratch(x.shape, x.dtype)
    b.step(np.multiply, x, x.dtype.type(factor), scaled)
    return scaled


def _addend(b: Bind, beta: float, shape: tuple[int, ...]) -> Operands:
    """beta * C as a bias, if it is one number for each column or for all, else as a residual."""
    if not b.has(2) or beta == 0:
        return Operands()
    c = b.array(2).shape
    if np.broadcast_shapes(c, shape) != shape:
        raise ValueError(f"input 2 {list(c)} does not fit an output {list(shape)}")
    if math.prod(c[:-1]) == 1:
        return Operands(bias=padded_features(b, 2, shape[1], beta))
    return Operands(residual=_times(b, widened(b, 2), beta))


def _parse_equation(node: Node) -> str:
    equation = str(node.attributes.get("equation", "")).replace(" ", "")
    if not equation:
        raise Unsupported("equation is missing")
    return equation


def _einsum(equation: str, path: Any, operands: list[np.ndarray], y: np.ndarray) -> None:
    np.einsum(equation, *operands, out=y, optimize=path)


@kernel("Einsum", since=12, dtypes={0: NUMBERS}, parse=_parse_equation)
def einsum(b: Bind, equation: str) -> None:
    """ONNX Einsum-12, contracted in the order that costs least. Strides of the operands would show in the last bits."""
    operands = [b.contiguous(widened(b, i)) for i in range(len(b.node.inputs))]
    path = np.einsum_path(equation, *operands, optimize="optimal" if len(operands) < 6 else "greedy")[0]
    y = b.out(0, _einsum_shape(equation, operands), b.array(0).dtype)
    total = target(b, y)
    b.step(_einsum, equation, path, operands, total)
    finish(b, y, total)


def _einsum_shape(equation: str, operands: list[np.ndarray]) -> tuple[int, ...]:
    """The shape of the result, found on stand-ins that hold no memory."""
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        raise ValueError(f"equation {equation!r} has {len(terms)} terms for {len(operands)} inputs")
    sizes: dict[str, int] = {}
    batch: tuple[int, ...] = ()
    for term, x in zip(terms, operands, strict=True):
        before, dots, after = term.partition("...")
        if dots:
            batch = np.broadcast_shapes(batch, x.shape[len(before) : x.ndim - len(after)])
            axes = x.shape[: len(before)] + x.shape[x.ndim - len(after) :]
        else:
            axes = x.shape
        for label, n in zip(before + after, axes, strict=True):
            sizes[label] = n if sizes.get(label, 1) == 1 else sizes[label]
    if not arrow:
        letters = inputs.replace(",", "").replace(".", "")
        output = ("..." if "..." in inputs else "") + "".join(c for c in sorted(set(letters)) if letters.count(c) == 1)
    before, dots, after = output.partition("...")
    return tuple(sizes[c] for c in before) + (batch if dots else ()) + tuple(sizes[c] for c in after)
