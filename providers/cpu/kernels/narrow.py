"""Constant weights of 8-bit integers as the compiled products read them: the narrow form of source/integer.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_PANEL = 16  # NR of integer.h
_MOST = 128  # of the weights of one sign that meet in an int16: times 255 they fit
# Multiplications of vectors for eight numbers of a row: by octets, by quads, for each extra quad, and by int16, where
# more additions make the same four cost more.
_OCTET, _QUADS, _EXTRA, _WIDE = 3.0, 4.0, 2.0, 4.6


@dataclass(frozen=True)
class Narrow:
    """The arrays of `struct weights`, in its order."""

    panels: np.ndarray
    octets: int
    first: np.ndarray
    at: np.ndarray
    extra: np.ndarray
    adjust: np.ndarray
    zeros: np.ndarray | None

    def words(self) -> list[Any]:
        """The words of `struct weights`."""
        return [self.panels, 1, self.octets, self.first, self.at, self.extra, self.adjust, self.zeros]


def narrow(w: np.ndarray, zero: np.ndarray) -> Narrow | None:
    """w [n, depth, columns], uint8 or int8, zero points [n, columns]; None where the wide form costs less."""
    whole, points = w.astype(np.int16), zero.astype(np.int32)
    if w.dtype == np.uint8:
        whole -= 128
        points = points - 128
    n, depth, columns = w.shape
    count, quads = -(-columns // _PANEL), -(-depth // 4)
    padded = np.zeros((n, quads * 4, count * _PANEL), np.int16)
    padded[:, :depth, :columns] = whole
    packed = padded.reshape(n, quads, 4, count, _PANEL).transpose(0, 3, 1, 4, 2).reshape(n * count, quads, _PANEL, 4)
    pairs = packed.reshape(*packed.shape[:-1], 2, 2)
    kept = np.where(_above(pairs), pairs >> 1, pairs)
    octets = quads // 2
    fewer, cost = kept, _QUADS + _extra_cost(pairs - kept)
    joined = _octets(pairs, kept)
    if joined is not None:
        by_octets = _OCTET + _extra_cost(pairs - joined)
        if by_octets <= cost:
            fewer, cost = joined, by_octets
        else:
            joined = None
    if cost > _WIDE:
        return None
    rest = (pairs - fewer).reshape(packed.shape)
    panel, quad = np.nonzero(rest.any(axis=(-1, -2)))
    sums = np.zeros((n, count * _PANEL), np.int64)
    sums[:, :columns] = whole.sum(axis=1, dtype=np.int64) - depth * points
    zeros = np.zeros((n, count * _PANEL), np.int32)
    zeros[:, :columns] = points
    return Narrow(
        np.ascontiguousarray(fewer.reshape(packed.shape), np.int8),
        0 if joined is None else octets,
        np.searchsorted(panel, np.arange(n * count + 1)).astype(np.int32),
        quad.astype(np.int32),
        np.ascontiguousarray(rest[panel, quad], np.int8),
        sums.astype(np.int32),
        zeros if points.any() else None,
    )


def _above(pairs: np.ndarray) -> np.ndarray:
    """Where the weights of one sign, added along the last axis, are more than an int16 takes; that axis is kept."""
    positive = np.maximum(pairs, 0).sum(axis=-1, keepdims=True) > _MOST
    negative = np.minimum(pairs, 0).sum(axis=-1, keepdims=True) < -_MOST
    above: np.ndarray = positive | negative
    return above


def _extra_cost(rest: np.ndarray) -> float:
    """What the extra quads cost, for eight numbers of a row of one panel."""
    some = rest.any(axis=(-1, -2, -3))
    return _EXTRA * float(some.mean()) * 2 if some.size else 0.0


def _octets(pairs: np.ndarray, kept: np.ndarray) -> np.ndarray | None:
    """`kept` with less, so that the pairs of two neighbouring quads fit an int16 together; None where they cannot.

    The second pair is left out, or the first where the second is divided already.
    """
    even = pairs.shape[1] // 2 * 2
    shape = (pairs.shape[0], even // 2, 2, *pairs.shape[2:])  # [panel, octet, quad, column, pair, 2]
    joined = kept[:, :even].reshape(shape).copy()
    divided = (kept != pairs)[:, :even].any(axis=-1, keepdims=True).reshape(*shape[:-1], 1)
    both = np.moveaxis(joined, 2, -2).reshape(*shape[:2], *shape[3:5], 4)
    above = _above(both)  # [panel, octet, column, pair, 1]
    if (above & divided[:, :, 0] & divided[:, :, 1]).any():
        return None
    np.copyto(joined[:, :, 1], 0, where=above & ~divided[:, :, 1])
    np.copyto(joined[:, :, 0], 0, where=above & divided[:, :, 1])
    result = kept.copy()
    result[:, :even] = joined.reshape(pairs.shape[0], even, *pairs.shape[2:])
    return result
