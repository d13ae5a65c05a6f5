"""`import outrider as ort`: the tests of `test_dropin.py`, written for onnxruntime, with only their import changed."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

THEIRS, OURS = "import onnxruntime as ort\n", "import outrider as ort\n"
SOURCE = (Path(__file__).parent / "test_dropin.py").read_text()

exec(compile(SOURCE.replace(THEIRS, OURS), "test_dropin.py with another import", "exec"), globals())


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
