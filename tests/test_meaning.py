"""What trained models are for: text is read, files and sounds are told apart, names are spelled, words are spoken."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import outrider
from tests.drawing import write
from tests.kinds import kind_path, romanizer_tokens
from tests.models import magika_bytes, model_path, tone


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "numpy"])
def fleet(request: pytest.FixtureRequest) -> Iterator[outrider.Fleet]:
    """Two workers, so that a model may be cut."""
    options = {"compiled": request.param}
    with outrider.Fleet([outrider.ProviderSpec(name, options=options, threads=1) for name in ("cpu", "cpu:1")]) as made:
        yield made


def opened(fleet: outrider.Fleet, path: object, **options: object) -> outrider.InferenceSession:
    return outrider.InferenceSession(str(path), options=outrider.SessionOptions(fleet=fleet, **options))


# Reading ------------------------------------------------------------------------------------------------------------

LINES = (("OUTRIDER", 60, 40), ("RUNS ONE MODEL", 40, 120), ("IN 4 PROCESSES", 90, 200), ("20 JULY 1969", 300, 270))


def blobs(mask: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The connected pieces of a mask [H, W], top down: rows and columns of their pixels."""
    names = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        around = np.pad(names, 1)
        grown = np.maximum.reduce([names, around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:]])
        grown = np.where(mask, grown, 0)
        if (grown == names).all():
            break
        names = grown
    pieces = [np.nonzero(names == name) for name in np.unique(names[mask])]
    return sorted(pieces, key=lambda piece: int(piece[0].min()))


def boxes(likely: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Lines of text in a map of probabilities [H, W], as top, bottom, left, right.

    The detector marks shrunken lines: each is grown by 2 * area / outline (Liao et al., DBNet, 2020).
    """
    found = []
    for rows, columns in blobs(likely > 0.3):
        if rows.size < 50 or likely[rows, columns].mean() < 0.6:
            continue
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        more = int(2 * height * width / (2 * (height + width)))
        found.append((rows.min() - more, rows.max() + more, columns.min() - more, columns.max() + more))
    return [(max(a, 0), min(b, likely.shape[0]), max(c, 0), min(d, likely.shape[1])) for a, b, c, d in found]


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """A grey image at another size, linear between pixels."""
    rows = np.clip((np.arange(height) + 0.5) * image.shape[0] / height - 0.5, 0, image.shape[0] - 1)
    columns = np.clip((np.arange(width) + 0.5) * image.shape[1] / width - 0.5, 0, image.shape[1] - 1)
    across = np.stack([np.interp(columns, np.arange(image.shape[1]), line) for line in image])
    return np.stack([np.interp(rows, np.arange(image.shape[0]), line) for line in across.T], 1)


def colours(image: np.ndarray) -> np.ndarray:
    """A grey image in [0, 1] as the models take it: float32 [1, 3, H, W] in [-1, 1]."""
    return np.repeat(2 * image[None, None] - 1, 3, 1).astype(np.float32)


def spelled(scores: np.ndarray, characters: list[str]) -> str:
    """The text of scores [T, 1 + characters]: the best of each step, repetitions and blanks (0) left out."""
    best = scores.argmax(-1)
    kept = best[(best != 0) & (best != np.concatenate([[0], best[:-1]]))]
    return "".join(characters[one - 1] for one in kept)


@pytest.mark.parametrize("strategy", ["priority", "pipeline"])
def test_text_in_an_image_is_found_and_read(fleet: outrider.Fleet, strategy: str) -> None:
    rng = np.random.default_rng(5)
    image = np.clip(0.92 + 0.02 * rng.standard_normal((320, 640)), 0, 1)
    for text, left, top in LINES:
        write(image, text, left, top, 30)
    detector = opened(fleet, model_path("ppocr-det"), strategy=strategy)
    reader = opened(fleet, model_path("ppocr-rec"), strategy=strategy)
    with detector, reader:
        characters = [*reader.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
        (likely,) = detector.run(None, {"x": colours(image)})
        places = boxes(likely[0, 0])
        read = []
        for top, bottom, left, right in places:
            line = image[top:bottom, left:right]
            line = resized(line, 48, round(48 * line.shape[1] / line.shape[0]))
            read.append(spelled(reader.run(None, {"x": colours(line)})[0][0], characters))
    assert [text.replace(" ", "") for text in read] == [text.replace(" ", "") for text, _, _ in LINES]
    for (top, bottom, left, _), (_, x, y) in zip(places, LINES, strict=True):
        assert (abs(left - x), abs(top - y), abs(bottom - y - 30)) < (16, 16, 16)
