"""Text drawn into an image with a pen: capital letters and digits as strokes and arcs, smooth at the edges."""

from __future__ import annotations

import numpy as np

# Each glyph: its width, then strokes. The cell is 6 high, y from the top. A stroke is a list of corners, or an arc
# (x, y, radius across, radius down, from, to) in degrees, clockwise from the right.
Stroke = tuple[tuple[float, float], ...] | tuple[float, float, float, float, float, float]
GLYPHS: dict[str, tuple[float, list[Stroke]]] = {
    " ": (2.5, []),
    "A": (4, [((0, 6), (2, 0), (4, 6)), ((0.7, 4), (3.3, 4))]),
    "B": (
        3.6,
        [
            ((2, 0), (0, 0), (0, 6), (2, 6)),
            ((0, 2.9), (2, 2.9)),
            (2, 1.45, 1.4, 1.45, -90, 90),
            (2, 4.45, 1.6, 1.55, -90, 90),
        ],
    ),
    "C": (4, [(2.3, 3, 2.3, 3, 50, 310)]),
    "D": (4, [((1.2, 0), (0, 0), (0, 6), (1.2, 6)), (1.2, 3, 2.8, 3, -90, 90)]),
    "E": (3.4, [((3.4, 0), (0, 0), (0, 6), (3.4, 6)), ((0, 2.9), (2.9, 2.9))]),
    "F": (3.2, [((3.2, 0), (0, 0), (0, 6)), ((0, 2.9), (2.7, 2.9))]),
    "G": (4.4, [(2.3, 3, 2.3, 3, 30, 310), ((2.6, 3.2), (4.3, 3.2), (4.3, 4.6))]),
    "H": (4, [((0, 0), (0, 6)), ((4, 0), (4, 6)), ((0, 2.9), (4, 2.9))]),
    "I": (0.2, [((0.1, 0), (0.1, 6))]),
    "J": (2.8, [((2.8, 0), (2.8, 4.4)), (1.4, 4.4, 1.4, 1.6, 0, 170)]),
    "K": (3.8, [((0, 0), (0, 6)), ((3.6, 0), (0, 3.8)), ((1.3, 2.6), (3.8, 6))]),
    "L": (3.2, [((0, 0), (0, 6), (3.2, 6))]),
    "M": (4.8, [((0, 6), (0, 0), (2.4, 5), (4.8, 0), (4.8, 6))]),
    "N": (4, [((0, 6), (0, 0), (4, 6), (4, 0))]),
    "O": (4.6, [(2.3, 3, 2.3, 3, 0, 360)]),
    "P": (3.6, [((2, 0), (0, 0), (0, 6)), ((0, 3.2), (2, 3.2)), (2, 1.6, 1.6, 1.6, -90, 90)]),
    "Q": (4.6, [(2.3, 3, 2.3, 3, 0, 360), ((2.9, 4.4), (4.5, 6.3))]),
    "R": (3.8, [((2, 0), (0, 0), (0, 6)), ((0, 3.1), (2, 3.1)), (2, 1.55, 1.6, 1.55, -90, 90), ((2, 3.1), (3.8, 6))]),
    "S": (3.6, [(1.8, 1.5, 1.7, 1.5, 90, 330), (1.8, 4.45, 1.8, 1.55, -90, 150)]),
    "T": (4, [((0, 0), (4, 0)), ((2, 0), (2, 6))]),
    "U": (4, [((0, 0), (0, 3.9)), ((4, 0), (4, 3.9)), (2, 3.9, 2, 2.1, 0, 180)]),
    "V": (4, [((0, 0), (2, 6), (4, 0))]),
    "W": (5.6, [((0, 0), (1.4, 6), (2.8, 0.6), (4.2, 6), (5.6, 0))]),
    "X": (4, [((0, 0), (4, 6)), ((4, 0), (0, 6))]),
    "Y": (4, [((0, 0), (2, 3), (4, 0)), ((2, 3), (2, 6))]),
    "Z": (3.8, [((0, 0), (3.8, 0), (0, 6), (3.8, 6))]),
    "0": (3.4, [(1.7, 3, 1.7, 3, 0, 360)]),
    "1": (1.6, [((0, 1.2), (1.4, 0), (1.4, 6))]),
    "2": (3.4, [(1.7, 1.7, 1.6, 1.7, 190, 390), ((3.08, 2.55), (0, 6), (3.4, 6))]),
    "3": (3.4, [(1.6, 1.5, 1.6, 1.5, 200, 450), (1.6, 4.45, 1.8, 1.55, -90, 160)]),
    "4": (3.8, [((2.8, 6), (2.8, 0), (0, 4.2), (3.8, 4.2))]),
    "5": (3.4, [((3.1, 0), (0.5, 0), (0.2, 2.8)), (1.6, 4.1, 1.8, 1.9, 220, 510)]),
    "6": (3.4, [(1.7, 4.2, 1.7, 1.8, 0, 360), (3.1, 4.2, 3.1, 4.2, 180, 265)]),
    "7": (3.4, [((0, 0), (3.4, 0), (1.2, 6))]),
    "8": (3.4, [(1.7, 1.5, 1.5, 1.5, 0, 360), (1.7, 4.5, 1.7, 1.5, 0, 360)]),
    "9": (3.4, [(1.7, 1.8, 1.7, 1.8, 0, 360), (0.3, 1.8, 3.1, 4.2, 0, 85)]),
}


def _corners(stroke: Stroke) -> np.ndarray:
    """The corners of a stroke, [n, 2]; an arc becomes a line of short pieces."""
    if isinstance(stroke[0], tuple):
        return np.array(stroke, float)
    x, y, across, down, start, stop = (float(one) for one in stroke)  # type: ignore[arg-type]
    angles = np.radians(np.linspace(start, stop, 24))
    return np.stack([x + across * np.cos(angles), y + down * np.sin(angles)], 1)


def write(image: np.ndarray, text: str, left: float, top: float, height: float, ink: float = 0.1) -> float:
    """Draw `text` into a grey image [H, W] in place, `height` pixels high; returns where it ends.

    KeyError for characters that GLYPHS does not have.
    """
    scale = height / 6
    pen = 0.45 * scale
    for character in text:
        width, strokes = GLYPHS[character]
        first, last = int(left - pen - 1), int(left + width * scale + 2 * pen + 2)
        above, below = int(top - pen - 1), int(top + height + 2 * pen + 2)
        part = image[above:below, first:last]
        rows, columns = np.mgrid[above:below, first:last][:, : part.shape[0], : part.shape[1]]
        nearest = np.full(part.shape, np.inf)
        for stroke in strokes:
            corners = _corners(stroke) * scale + (left, top)
            for (ax, ay), (bx, by) in zip(corners[:-1], corners[1:], strict=True):
                dx, dy = bx - ax, by - ay
                along = np.clip(((columns - ax) * dx + (rows - ay) * dy) / (dx * dx + dy * dy), 0, 1)
                nearest = np.minimum(nearest, np.hypot(columns - ax - along * dx, rows - ay - along * dy))
        cover = np.clip(pen - nearest + 0.5, 0, 1)
        part[...] = part * (1 - cover) + ink * cover
        left += (width + 1.5) * scale
    return left
