"""Col2Im: the columns of windows added up to the image they overlap in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, kernel
from outrider.providers.cpu.kernels.precision import cast, finish, target
from outrider.providers.cpu.kernels.support import ints
from outrider.providers.wire.dtypes import NUMBERS
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Windows:
    """Attributes of Col2Im; lists are empty where omitted."""

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]


def _parse(node: Node) -> Windows:
    strides, pads, dilations = (tuple(ints(node.attributes.get(k, []))) for k in ("strides", "pads", "dilations"))
    return Windows(strides, pads, dilations)


def _add_up(
    columns: np.ndarray, steps: Sequence[int], dilations: Sequence[int], padded: np.ndarray, places: Sequence[int]
) -> None:
    """columns [N, C, *block, *places] into padded [N, C, *image with pads]."""
    padded[...] = 0
    rank = len(steps)
    for tap in itertools.product(*(range(n) for n in columns.shape[2 : 2 + rank])):
        window: tuple[Any, ...] = tuple(
            slice(at * d, at * d + s * (n - 1) + 1, s)
            for at, d, s, n in zip(tap, dilations, steps, places, strict=True)
        )
        part: tuple[Any, ...] = (slice(None), slice(None), *tap)
        padded[(..., *window)] += columns[part]


@kernel("Col2Im", since=18, dtypes={0: NUMBERS}, parse=_parse)
def col2im(b: Bind, p: Windows) -> None:
    """Col2Im-18: x [N, C * block, places] and the shapes of image and block -> [N, C, *image].

    ValueError where as many places do not fit the image.
    """
    x, image, block = b.array(0), ints(b.const(1)), ints(b.const(2))
    rank = len(image)
    strides, dilations, pads = p.strides or (1,) * rank, p.dilations or (1,) * rank, p.pads or (0,) * (2 * rank)
    whole = [image[a] + pads[a] + pads[rank + a] for a in range(rank)]
    places = [(whole[a] - dilations[a] * (block[a] - 1) - 1) // strides[a] + 1 for a in range(rank)]
    taps = int(np.prod(block))
    if len(block) != rank or x.ndim != 3 or x.shape[1] % taps or x.shape[2] != np.prod(places):
        raise ValueError(f"columns {list(x.shape)} of blocks {block} do not make an image {image}: {places} places")
    channels = x.shape[1] // taps
    y = b.out(0, (x.shape[0], channels, *image), x.dtype)
    computed = target(b, y)
    padded = b.scratch((x.shape[0], channels, *whole), computed.dtype) if any(pads) else computed
    columns = b.contiguous(cast(b, x, computed.dtype)).reshape(x.shape[0], channels, *block, *places)
    b.step(_add_up, columns, strides, dilations, padded, places)
    if padded is not computed:
        inner: tuple[Any, ...] = tuple(slice(pads[a], pads[a] + image[a]) for a in range(rank))
        b.step(np.copyto, computed, padded[(..., *inner)])
    finish(b, y, computed)
