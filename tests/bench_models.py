"""The real models with inputs of useful size, as a folder for `outrider bench models` and `outrider bench nodes`.

    python -m tests.bench_models FOLDER

writes `NAME.onnx` (a link to the cached file) and `NAME.npz` for each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

from tests.kinds import KINDS, kind_path
from tests.models import MODELS, TEXTS, Feeds, feeds, magika_bytes, model_path, page
from tests.networks import quantised


def _pixels(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(-1, 1, shape).astype(np.float32)


def _sentences(rng: np.random.Generator) -> Feeds:
    """Four of 64 word pieces, the last one padded."""
    ids = rng.integers(1996, 30522, (4, 64))
    ids[:, 0], ids[:, -1] = 101, 102
    mask = np.ones((4, 64), np.int64)
    ids[3, 40:], mask[3, 40:] = 0, 0
    return {"input_ids": ids.astype(np.int64), "attention_mask": mask, "token_type_ids": np.zeros((4, 64), np.int64)}


def _phonemes(rng: np.random.Generator) -> Feeds:
    """A sentence of 40."""
    ids = [1, 0, *(int(one) for phoneme in rng.integers(14, 60, 40) for one in (phoneme, 0)), 2]
    lengths = np.array([len(ids)], np.int64)
    return {"input": np.array([ids]), "input_lengths": lengths, "scales": np.array([0, 1, 0], np.float32)}


def _tokens(rng: np.random.Generator) -> Feeds:
    tokens = np.array([[0, *rng.integers(43, 150, 40), 0]])
    return {"tokens": tokens, "style": (0.1 * rng.standard_normal((1, 256))).astype(np.float32), "speed": _ONE}


_ONE = np.ones(1, np.float32)

# Where the inputs of the tests are smaller than what a user has.
SIZES: dict[str, Callable[[np.random.Generator], Feeds]] = {
    "ppocr-det": lambda rng: {"x": _pixels(rng, 1, 3, 320, 640)},
    "ppocr-rec": lambda rng: {"x": _pixels(rng, 2, 3, 48, 320)},
    "ppocr-cls": lambda rng: {"x": _pixels(rng, 2, 3, 48, 192)},
    "magika": lambda rng: {"bytes": np.concatenate([magika_bytes(TEXTS["python"] * n) for n in (1, 4, 8, 12)])},
    "minilm": _sentences,
    "ddddocr": lambda rng: {"input1": page(rng, 64, 200)[:, :1].copy()},
    "ddddocr-int8": lambda rng: {"input1": page(rng, 64, 200)[:, :1].copy()},
    "piper": _phonemes,
    "kokoro": _tokens,
}


# Models whose weights and activations are quantised here, with pairs of QuantizeLinear and DequantizeLinear.
PAIRS = ("ppocr-cls", "magika")


def write(folder: Path) -> None:
    """Fill the folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in {**MODELS, **KINDS}.items():
        link = folder / f"{name}.onnx"
        link.unlink(missing_ok=True)
        link.symlink_to(kind_path(name) if name in KINDS else model_path(name))
        make = SIZES.get(name, model.make)
        np.savez(folder / f"{name}.npz", **make(np.random.default_rng(0)))
    for name in PAIRS:
        made = quantised(onnx.load(model_path(name)), "qdq", [feeds(name, seed) for seed in range(3)])
        (folder / f"{name}-qdq.onnx").write_bytes(made)
        np.savez(folder / f"{name}-qdq.npz", **SIZES[name](np.random.default_rng(0)))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
