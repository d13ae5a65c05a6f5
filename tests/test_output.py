"""Lines of a worker's output are whole, however the bytes arrive; a flood is counted, and stops nobody."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler import InferenceSession, SessionOptions, errors
from outrider.scheduler.log_queue import QUEUED, LogQueue
from outrider.scheduler.output import CHARACTERS, KEPT_BYTES, LINES, WorkerOutput
from tests.builders import model, node, tensor

HERE = os.path.dirname(os.path.abspath(__file__))
FILE = os.path.join(HERE, "limited_providers.py")
IDENTITY = model([node("Identity", "x", "y", "n0")], [tensor("x", ["N"])], [tensor("y", None)])
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds
LEFT_OUT = "lines of its output were left out"


def texts(records: list[tuple[int, str]]) -> list[str]:
    return [text for _, text in records]


@pytest.mark.fast
@settings(deadline=None, derandomize=True)
@given(st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=9), max_size=9), st.data())
def test_lines_do_not_depend_on_how_the_bytes_are_cut(lines: list[str], data: st.DataObject) -> None:
    body = "\n".join(lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    output, seen = WorkerOutput(), []
    for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True):
        seen += output.add(body[start:stop], 0)
    seen += output.end()
    assert texts(seen) == (lines[:-1] if lines and not lines[-1] else lines)
    assert output.tail() == body.decode()


@pytest.mark.fast
def test_only_the_last_64_kib_are_kept_and_an_endless_line_is_cut() -> None:
    output = WorkerOutput()
    lines = [line for _ in range(200) for line in texts(output.add(b"x" * 1000, 0))]
    assert output.tail() == "x" * KEPT_BYTES
    assert sum(map(len, lines)) + len("".join(texts(output.end()))) == 200_000
    assert max(map(len, lines)) <= KEPT_BYTES + 1000


@pytest.mark.fast
def test_damaged_text_is_shown_with_replacements() -> None:
    output = WorkerOutput()
    assert output.add(b"caf\xc3", 0) == []
    assert texts(output.add(b"\xa9\r\n\xff\x00\x1b\n", 0)) == ["caf\u00e9", "\ufffd\x00\x1b"]


@pytest.mark.fast
@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 3 * LINES), st.floats(0, 2), st.booleans()), max_size=8))
def test_every_line_is_logged_or_counted(writes: list[tuple[int, float, bool]]) -> None:
    """`writes`: how many lines, how long after the write before, whether the last one is ended only by the next."""
    output, records, now, written = WorkerOutput(), [], 0.0, 0
    for count, later, split in writes:
        now += later
        body = b"".join(b"line %d\n" % (written + i) for i in range(count))
        written += count
        cut = len(body) - 3 if split and body else len(body)
        records += output.add(body[:cut], now) if cut else []
        records += output.add(body[cut:], now + later / 2) if body[cut:] else []
    records += output.end()
    lines = [text for level, text in records if level == logging.INFO]
    dropped = sum(int(text.partition(" ")[0]) for level, text in records if level == logging.WARNING)
    assert len(lines) + dropped == written
    numbers = [int(line.partition(" ")[2]) for line in lines]
    assert numbers == sorted(set(numbers))  # whole, in order, none twice


@pytest.mark.fast
def test_no_more_lines_in_a_second_than_may_be_and_the_count_of_the_others() -> None:
    output = WorkerOutput()
    assert len(output.add(b"a\n" * (LINES + 5), 0.0)) == LINES
    assert output.add(b"b\nhalf ", 0.9) == []
    records = output.add(b"a line\nc\n", 1.0)
    assert records == [
        (logging.WARNING, f"7 {LEFT_OUT}: more than {LINES} in a second"),
        (logging.INFO, "c"),
    ]


@pytest.mark.fast
def test_long_lines_are_bounded_by_their_characters() -> None:
    output = WorkerOutput()
    records = output.add((b"z" * 1023 + b"\n") * 1000, 0.0)
    assert len(records) == -(-CHARACTERS // 1023)
    assert texts(output.end()) == [f"{1000 - len(records)} {LEFT_OUT}: more than {LINES} in a second"]


@pytest.mark.fast
def test_what_nobody_wants_is_kept_and_not_counted() -> None:
    output = WorkerOutput()
    assert output.add(b"a\nb\nha", 0, wanted=False) == []
    assert texts(output.add(b"lf\nc\n", 0)) == ["c"]
    assert output.end() == []
    assert output.tail() == "a\nb\nhalf\nc\n"


# Handlers that are slow -------------------------------------------------------------------------------------------
class Gate(logging.Handler):
    """Blocks in the first record until opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.entered = threading.Event(), threading.Event()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.open.wait(ENOUGH)
        self.seen.append(record.getMessage())


@pytest.fixture
def gate() -> Iterator[Gate]:
    handler = Gate()
    loggers = [logging.getLogger(f"outrider.{name}") for name in ("worker", "fleet", "session")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    yield handler
    handler.open.set()
    for logger in loggers:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


@pytest.mark.fast
def test_lines_wait_for_a_slow_handler_and_what_does_not_fit_is_counted(gate: Gate) -> None:
    log = LogQueue()
    text = "x" * 900
    fit = QUEUED // 1000
    for _ in range(fit + 8):
        log.put("outrider.worker.one", [(logging.INFO, text)])
    assert gate.entered.wait(ENOUGH)
    gate.open.set()
    while len(gate.seen) < fit:
        time.sleep(0.001)
    log.put("outrider.worker.two", [(logging.INFO, "of another")])
    log.put("outrider.worker.one", [(logging.INFO, "at last")])
    log.close()
    told = gate.seen[fit:]
    assert told[-2:] == [told[-2], "at last"]
    assert "lines were left out here: the handlers of logging are too slow" in told[-2]
    assert len(gate.seen) - 2 - 1 + int(told[-2].partition(" ")[0]) == fit + 8
    log.close()


def test_a_handler_that_never_returns_stops_neither_runs_nor_replays_nor_close(gate: Gate) -> None:
    x = np.full(1, 64, np.float32)
    with InferenceSession(IDENTITY, providers=[f"{FILE}:LoudAside"]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)
        assert gate.entered.wait(ENOUGH)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)
        with pytest.raises(errors.WorkerDiedError):
            session.run(None, {"x": x * 0})
        assert session.health()[f"{FILE}:LoudAside"]["deaths"] == 2
    assert len(gate.seen) == 0


@pytest.mark.fast
def test_after_the_end_lines_are_logged_at_once(gate: Gate) -> None:
    gate.open.set()
    log = LogQueue()
    log.close()
    log.logger("outrider.fleet").warning("%d late", 1)
    assert gate.seen == ["1 late"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_handler_that_raises_costs_the_lines_it_was_given(gate: Gate) -> None:
    log = LogQueue()
    gate.open.set()
    gate.addFilter(lambda record: 1 / 0 if record.getMessage() == "bad" else True)
    log.put("outrider.worker.one", [(logging.INFO, "bad"), (logging.INFO, "with it")])
    while log._thread is not None and log._thread.is_alive():
        time.sleep(0.001)
    log.put("outrider.worker.one", [(logging.INFO, "good")])
    log.close()
    assert gate.seen == ["good"]


# Floods -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fd", [1, 2])
@pytest.mark.parametrize("line", [b"x" * 63 + b"\n", b"\xff\x00" * 32, b"\n" * 64], ids=["lines", "garbage", "empty"])
def test_a_flood_of_100_mb_stops_nobody(fd: int, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.worker")
    x = np.array([100_000], np.float32)  # KiB
    with InferenceSession(IDENTITY, providers=[(f"{FILE}:Loud", {"fd": fd, "line": line})]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)
        assert session.health()[f"{FILE}:Loud"]["deaths"] == 0
    logged = sum(len(record.getMessage()) for record in caplog.records)
    counted = [record for record in caplog.records if LEFT_OUT in record.getMessage()]
    assert counted
    assert logged < 5 << 20


def test_a_flood_from_another_thread_is_read_while_runs_and_deaths_go_on() -> None:
    provider = f"{FILE}:LoudAside"
    x = np.ones(4, np.float32)
    with InferenceSession(IDENTITY, providers=[provider], options=SessionOptions(replay=False)) as session:
        for _ in range(200):
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)
        with pytest.raises(errors.WorkerDiedError) as caught:
            session.run(None, {"x": x * 0})
        assert len(caught.value.stderr) == KEPT_BYTES
