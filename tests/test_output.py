"""Lines of a worker's output are whole, however the bytes arrive."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.output import KEPT_BYTES, WorkerOutput

pytestmark = pytest.mark.fast


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=9), max_size=9), st.data())
def test_lines_do_not_depend_on_how_the_bytes_are_cut(lines: list[str], data: st.DataObject) -> None:
    body = "\n".join(lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    output, seen = WorkerOutput(), []
    for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True):
        seen += output.add(body[start:stop])
    seen += output.end()
    assert seen == (lines[:-1] if lines and not lines[-1] else lines)
    assert output.tail() == body.decode()


def test_only_the_last_64_kib_are_kept_and_an_endless_line_is_cut() -> None:
    output = WorkerOutput()
    lines = [line for _ in range(200) for line in output.add(b"x" * 1000)]
    assert output.tail() == "x" * KEPT_BYTES
    assert sum(map(len, lines)) + len("".join(output.end())) == 200_000
    assert max(map(len, lines)) <= KEPT_BYTES + 1000


def test_damaged_text_is_shown_with_replacements() -> None:
    output = WorkerOutput()
    assert output.add(b"caf\xc3") == []
    assert output.add(b"\xa9\r\n\xff\n") == ["caf\u00e9", "\ufffd"]
