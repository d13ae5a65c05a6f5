"""What trained models are for: text is read, files and sounds are told apart, names are spelled, words are spoken."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import outrider
from tests.drawing import write
from tests.kinds import kind_path, romanizer_tokens
from tests.models import TEXTS, magika_bytes, model_path, tone


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


# Files --------------------------------------------------------------------------------------------------------------

# What a file holds, and its place in magika's list of labels.
FILES: dict[str, tuple[int, bytes]] = {
    "c": (
        17,
        b"#include <stdio.h>\n\nstatic int total(const int *values, int count)\n{\n    int sum = 0;\n"
        b"    for (int i = 0; i < count; i++)\n        sum += values[i];\n    return sum;\n}\n",
    ),
    "css": (
        31,
        b"body {\n  margin: 0;\n  color: #333;\n}\n\n"
        b".menu > li {\n  display: inline-block;\n  padding: 0 1em;\n}\n",
    ),
    "csv": (32, b"name,born,died\nAda,1815,1852\nCharles,1791,1871\nGrace,1906,1992\nAlan,1912,1954\n"),
    "html": (71, TEXTS["html"]),
    "javascript": (
        83,
        b"'use strict';\n\nconst fs = require('fs');\n\nfunction lines(path) {\n"
        b"  return fs.readFileSync(path, 'utf8').split('\\n');\n}\n\nmodule.exports = { lines };\n",
    ),
    "json": (87, TEXTS["json"]),
    "markdown": (
        100,
        b"# A project\n\nIn *one* line.\n\n## Install\n\n"
        b"```\npip install project\n```\n\n- [link](a.md)\n- another\n",
    ),
    "python": (143, TEXTS["python"]),
    "shell": (
        161,
        b'#!/bin/sh\nset -eu\n\nfor name in "$@"; do\n'
        b'    if [ -f "$name" ]; then\n        wc -l < "$name"\n    fi\ndone\n',
    ),
    "sql": (
        165,
        b"CREATE TABLE people (\n    id INTEGER PRIMARY KEY,\n    name VARCHAR(80) NOT NULL\n);\n\n"
        b"SELECT name, COUNT(*) FROM people WHERE id < 100 GROUP BY name ORDER BY name;\n",
    ),
    "xml": (
        206,
        b'<?xml version="1.0" encoding="UTF-8"?>\n'
        b'<catalog>\n  <book id="1"><author>Verne</author></book>\n</catalog>\n',
    ),
}  # fmt: skip


def test_files_of_many_types_are_named(fleet: outrider.Fleet) -> None:
    contents = np.concatenate([magika_bytes(content) for _, content in FILES.values()])
    with opened(fleet, model_path("magika")) as session:
        (scores,) = session.run(None, {"bytes": contents})
    named = dict(zip(FILES, scores.argmax(1).tolist(), strict=True))
    assert named == {kind: label for kind, (label, _) in FILES.items()}
    assert scores.max(1).min() > 0.5


# Sounds -------------------------------------------------------------------------------------------------------------

# "Hello world, this is a model that speaks." as the speech synthesiser numbers phonemes.
PHONEMES = (
    [20, 59, 24, 120, 27, 100, 3, 35, 120, 62, 122, 24, 17, 8, 3, 41, 74, 31, 3, 74, 38, 3, 50, 3]
    + [25, 120, 51, 122, 17, 59, 24, 3, 41, 39, 32, 3, 31, 28, 120, 21, 122, 23, 31, 10]
)  # fmt: skip


def spoken(session: outrider.InferenceSession, speed: float) -> np.ndarray:
    """The sentence at 16 kHz, without the noise that makes each time sound different; `speed`: how long it takes."""
    ids = [1, 0, *np.stack([PHONEMES, np.zeros(len(PHONEMES), int)], 1).ravel().tolist(), 2]
    inputs = {
        "input": np.array([ids], np.int64),
        "input_lengths": np.array([len(ids)], np.int64),
        "scales": np.array([0.0, speed, 0.0], np.float32),
    }
    sound = session.run(None, inputs)[0].ravel()
    times = np.arange(sound.size * 16000 // 22050) / 16000
    return np.interp(times, np.arange(sound.size) / 22050, sound).astype(np.float32)


def speech(session: outrider.InferenceSession, sound: np.ndarray) -> np.ndarray:
    """How likely each 32 ms of a sound at 16 kHz are speech; the detector remembers what was before."""
    state, before, likely = np.zeros((2, 1, 128), np.float32), np.zeros(64, np.float32), []
    for start in range(0, sound.size - 511, 512):
        chunk = sound[start : start + 512].astype(np.float32)
        inputs = {"input": np.concatenate([before, chunk])[None], "state": state, "sr": np.array(16000, np.int64)}
        probability, state = session.run(None, inputs)
        before = chunk[-64:]
        likely.append(float(probability.ravel()[0]))
    return np.array(likely)


def test_what_one_model_speaks_another_one_hears_as_speech(fleet: outrider.Fleet) -> None:
    rng = np.random.default_rng(1)
    with opened(fleet, kind_path("piper")) as synthesiser, opened(fleet, model_path("silero")) as detector:
        fast, slow = spoken(synthesiser, 1.0), spoken(synthesiser, 1.6)
        assert 2 < fast.size / 16000 < 3.5
        assert slow.size > 1.3 * fast.size
        for sound in (fast, slow):
            heard = speech(detector, sound)
            assert np.median(heard) > 0.9
            assert (heard > 0.5).mean() > 0.7
        others = {
            "noise": 0.1 * rng.standard_normal(32000),
            "soft noise": 0.003 * rng.standard_normal(32000),
            "silence": np.zeros(32000),
            "a tone": tone(440, 32000, 16000),
        }
        for name, sound in others.items():
            assert speech(detector, sound).max() < 0.3, name


# Names --------------------------------------------------------------------------------------------------------------


def latin(encoder: outrider.InferenceSession, decoder: outrider.InferenceSession, tokens: list[str], name: str) -> str:
    """An Arabic name in Latin letters, the likeliest letter at each step."""
    country, role, first, last = (tokens.index(mark) for mark in ("<UNK_COUNTRY>", "<ROLE_GIVEN>", "<BOS>", "<EOS>"))
    source = np.array([[country, role, *map(tokens.index, name), last]], np.int64)
    memory, mask, hidden = encoder.run(None, {"src": source, "src_mask": np.zeros(source.shape, bool)})
    written = [first]
    while written[-1] != last and len(written) < 30:
        prefix = np.array([written], np.int64)
        scores, hidden = decoder.run(None, {"prefix": prefix, "memory": memory, "src_mask": mask, "hidden": hidden})
        written.append(int(scores[0].argmax()))
    return "".join(tokens[one] for one in written[1:-1])


def test_names_are_spelled_in_another_script(fleet: outrider.Fleet) -> None:
    tokens = romanizer_tokens()
    encoder, decoder = (opened(fleet, kind_path(f"romanizer-{part}")) for part in ("encoder", "decoder"))
    with encoder, decoder:
        written = [latin(encoder, decoder, tokens, name) for name in ("محمد", "سليم", "كريم", "ليلى")]
    assert written == ["Mohamed", "Salim", "Karim", "Laila"]
