"""Declared shapes against those that arrived: what symbols stand for, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outrider.providers.wire.graph import Shape


def symbols_of(declared: Iterable[Shape], came: Iterable[tuple[int, ...] | None]) -> dict[str, int | None]:
    """What each symbol stands for, None for one that stands for two numbers. `came`: None for what has no shape."""
    symbols: dict[str, int | None] = {}
    for shape, extents in zip(declared, came, strict=True):
        for dim, extent in zip(shape or (), extents or (), strict=False):
            if isinstance(dim, str) and symbols.setdefault(dim, extent) != extent:
                symbols[dim] = None
    return symbols


def concrete(shape: Shape, symbols: Mapping[str, int | None]) -> tuple[int, ...] | None:
    """The shape in numbers; None where a dimension is not known."""
    if shape is None:
        return None
    dims = [symbols.get(dim) if isinstance(dim, str) else dim for dim in shape]
    known = tuple([dim for dim in dims if dim is not None])
    return known if len(known) == len(dims) else None


def fits(shape: Shape, extents: tuple[int, ...] | None, symbols: Mapping[str, int | None]) -> bool:
    """Whether something that arrived is as declared, as far as that is known."""
    if shape is None or extents is None:
        return True
    if len(shape) != len(extents):
        return False
    expected = [symbols.get(dim) if isinstance(dim, str) else dim for dim in shape]
    return all(dim is None or want == extent for dim, want, extent in zip(shape, expected, extents, strict=True))
