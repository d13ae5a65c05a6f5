"""The real models with inputs of useful size, as a folder for `outrider bench models` and `outrider bench nodes`.

    python -m tests.bench_models FOLDER

writes `NAME.onnx` (a link to the cached file) and `NAME.npz` for each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.models import MODELS, TEXTS, Feeds, feeds, magika_bytes, model_path


def _pixels(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(-1, 1, shape).astype(np.float32)


def _sentences(rng: np.random.Generator) -> Feeds:
    """Four of 64 word pieces, the last one padded."""
    ids = rng.integers(1996, 30522, (4, 64))
    ids[:, 0], ids[:, -1] = 101, 102
    mask = np.ones((4, 64), np.int64)
    ids[3, 40:], mask[3, 40:] = 0, 0
    return {"input_ids": ids.astype(np.int64), "attention_mask": mask, "token_type_ids": np.zeros((4, 64), np.int64)}


# Where the inputs of the tests are smaller than what a user has.
SIZES: dict[str, Callable[[np.random.Generator], Feeds]] = {
    "ppocr-det": lambda rng: {"x": _pixels(rng, 1, 3, 320, 640)},
    "ppocr-rec": lambda rng: {"x": _pixels(rng, 2, 3, 48, 320)},
    "ppocr-cls": lambda rng: {"x": _pixels(rng, 2, 3, 48, 192)},
    "magika": lambda rng: {"bytes": np.concatenate([magika_bytes(TEXTS["python"] * n) for n in (1, 4, 8, 12)])},
    "minilm": _sentences,
}


def write(folder: Path) -> None:
    """Fill the folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        link = folder / f"{name}.onnx"
        link.unlink(missing_ok=True)
        link.symlink_to(model_path(name))
        made = SIZES[name](np.random.default_rng(0)) if name in SIZES else feeds(name)
        np.savez(folder / f"{name}.npz", **made)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
