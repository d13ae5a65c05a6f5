"""Spans by themselves: what a recorder keeps, how they travel, and the file made of them."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.providers.wire import messages
from outrider.providers.wire.errors import WireError
from outrider.providers.wire.spans import KINDS, Recorder, Trace, plain_span, span_of
from outrider.scheduler import chrome
from outrider.scheduler.chrome import Link, Process
from outrider.scheduler.planning import CALLER

pytestmark = pytest.mark.fast
quick = settings(deadline=None, derandomize=True, max_examples=50)

TEXTS = st.text(max_size=300) | st.just("\ud800 half a pair")
ARGS = st.dictionaries(TEXTS, st.integers() | TEXTS | st.booleans() | st.dictionaries(TEXTS, st.integers(0, 1 << 62)))


@quick
@given(st.sampled_from(sorted(KINDS)), TEXTS, st.integers(0, 1 << 62), st.integers(0, 1 << 60), ARGS)
def test_a_span_travels_whatever_its_texts_are(kind: str, name: str, start: int, took: int, args: Any) -> None:
    span = plain_span((kind, name, 7, start, start + took, args))
    data = messages.TraceData(1, [span], 0, {7: "main"}, 0, False)
    again = messages.unpack(messages.pack(data))
    assert isinstance(again, messages.TraceData)
    made = span_of(again.spans[0])
    assert made[0] == kind and made[2:5] == (7, start, start + took)
    assert len(made[1]) <= 200 and name.encode(errors="backslashreplace").decode().startswith(made[1])


@pytest.mark.parametrize(
    "body",
    [
        7, [], ["step", "n", 1, 2, 3], ["nap", "n", 1, 2, 3, {}], ["step", 5, 1, 2, 3, {}], ["step", "n", 1, 3, 2, {}],
        ["step", "n", 1, -1, 2, {}], ["step", "n", 1, 2, 3.5, {}], ["step", "n", True, 2, 3, {}],
        ["step", "n", 1, 2, 3, []], ["step", "n", 1, 2, 3, {1: 2}], ["step", "n", 1, 2, 3, {"a": [1]}],
        ["step", "n", 1, 2, 3, {"a": {"b": {"c": 1}}}], ["step", "n", 1 << 40, 2, 3, {}], [["step"], "n", 1, 2, 3, {}],
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_span_is_refused(body: Any) -> None:
    with pytest.raises(WireError):
        span_of(body)


def test_the_oldest_spans_go_and_are_counted() -> None:
    recorder = Recorder(limit=10)
    recorder.start()
    for number in range(25):
        recorder.step(f"s{number}", "a::b", number, number + 1, {})
    assert (len(recorder), recorder.dropped) == (10, 15)
    assert [span[1] for span in recorder.take()] == [f"s{number}" for number in range(15, 25)]
    assert recorder.take() == []
    assert recorder.operators == {"a::b": [25, pytest.approx(25e-9)]}
    recorder.start()
    assert recorder.dropped == 0 and recorder.operators["a::b"][0] == 25


def test_parts_are_small_and_lose_nothing() -> None:
    recorder = Recorder()
    recorder.start()
    writes = {f"value {number}": number for number in range(16)}
    for number in range(3000):
        recorder.add("unit", f"{number} {'x' * 1000}", number, number, {"writes": writes, "bytes": number})
    seen: list[int] = []
    while recorder:
        spans = [plain_span(span) for span in recorder.take()]
        body = messages.pack(messages.TraceData(1, spans, len(recorder), dict(recorder.threads), 0, False))
        assert len(body) < 3 << 20
        seen += [span[3] for span in spans]
    assert seen == list(range(3000))


def test_threads_record_side_by_side() -> None:
    recorder = Recorder()

    def work() -> None:
        for number in range(500):
            with recorder.timed("step", "s", {"n": number}):
                pass

    threads = [threading.Thread(target=work, name=f"t{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder) == 2000
    assert sorted(recorder.threads.values()) == ["t0", "t1", "t2", "t3"]


def test_an_exception_is_noted_and_goes_on() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.timed("claim", "c"):
        raise KeyError("x")
    ((kind, name, thread, start, end, args),) = recorder.take()
    assert (kind, name, args) == ("claim", "c", {"error": "KeyError"}) and 0 < start <= end
    assert thread == threading.get_native_id()


def test_a_provider_s_trace_is_on_only_while_a_traced_session_has_the_worker() -> None:
    trace, recorder = Trace(), Recorder()
    trace.span("nobody listens", 1, 2)
    assert not trace.on
    with trace.into(recorder):
        assert trace.on
        trace.span("n", 1, 5, "ai.onnx::Relu", nbytes=64)
        with pytest.raises(ValueError, match="before it starts"):
            trace.span("n", 5, 1)
    with trace.into(None):
        assert not trace.on
    assert [span[:2] + span[5:] for span in recorder.take()] == [
        ("step", "n", {"bytes": 64, "op": "ai.onnx::Relu"}),
    ]


# The file ------------------------------------------------------------------------------------------------------------
def _partition(number: int, start: int, end: int, run: int = 1) -> Any:
    return ("partition", f"partition {number}", 9, start, end,
            {"session": 1, "generation": 2, "run": run, "partition": number})  # fmt: skip


LINKS = {
    (1, 2): [
        Link("x", CALLER, "", (0,), False),
        Link("v", 0, "maker", (1, 2), False),
        Link("w", 0, "hidden in a unit", (2,), True),
    ]
}


def _arrows(*processes: Process) -> list[tuple[str, int, float, int, float]]:
    events = chrome.document(processes, LINKS)["traceEvents"]
    begun = {one["id"]: one for one in events if one["ph"] == "s"}
    ended = [one for one in events if one["ph"] == "f"]
    return [(one["name"], begun[one["id"]]["pid"], begun[one["id"]]["ts"], one["pid"], one["ts"]) for one in ended]


def test_arrows_lead_from_what_wrote_a_value_to_those_that_read_it() -> None:
    run = {"session": 1, "generation": 2, "run": 1}
    caller = Process(1, "coordinator", {5: "main"}, [
        ("copy", "inputs", 5, 10_000, 11_000, {"bytes": 4}), ("copy", "results", 5, 90_000, 95_000, {}),
        ("run", "run 1", 5, 10_000, 99_000, run),
    ])  # fmt: skip
    first = Process(2, "a", {9: "main"}, [
        ("step", "maker", 9, 22_000, 23_000, {}), ("unit", "maker, other", 9, 21_000, 24_000, {}),
        ("unit", "more", 9, 25_000, 26_000, {"writes": {"w": 4}}), _partition(0, 20_000, 27_000),
    ])  # fmt: skip
    second = Process(3, "b", {9: "main"}, [_partition(1, 30_000, 31_000), _partition(2, 40_000, 41_000)])
    other_run = Process(4, "c", {9: "main"}, [_partition(1, 30_000, 31_000, run=7)])
    assert _arrows(caller, first, second, other_run) == [
        ("x", 1, 10.0, 2, 20.001), ("v", 2, 22.999, 3, 30.001), ("v", 2, 22.999, 3, 40.001),
        ("w", 2, 25.999, 3, 40.001), ("w", 2, 25.999, 1, 90.001),
    ]  # fmt: skip


def test_a_worker_that_tells_nonsense_spoils_nothing_but_its_own_spans() -> None:
    strange = [
        ("partition", "p", 9, 5, 6, {}), ("partition", "p", 9, 5, 6, {"session": "1", "run": {}, "partition": "x"}),
        ("unit", "u", 9, 5, 6, {"writes": 4}), ("step", "maker", 9, 5, 6, {}),
    ]  # fmt: skip
    assert _arrows(Process(3, "b", {}, [*strange, _partition(1, 1, 2)])) == []


def test_what_had_no_room_is_told_and_shown() -> None:
    plain = chrome.document([Process(3, "cpu", {9: "main"}, [_partition(0, 5000, 6000)], dropped=17)], {}, ["a note"])
    assert plain["otherData"]["missing"] == ["a note", "cpu: the first 17 spans had no room"]
    (shown,) = [one for one in plain["traceEvents"] if one["ph"] == "i"]
    assert (shown["pid"], shown["ts"], shown["name"]) == (3, 5.0, "cpu: the first 17 spans had no room")


def test_names_are_taken_in_turn_and_no_file_is_overwritten(tmp_path: Path) -> None:
    path, pid = str(tmp_path / "t.x.json"), os.getpid()
    written = [chrome.write_beside(path, {"traceEvents": [{"n": number}]}) for number in range(4)]
    stem = path[: -len(".json")]
    assert written == [path, f"{stem}.{pid}.json", f"{stem}.{pid}.2.json", f"{stem}.{pid}.3.json"]
    assert [f'"n":{number}' in Path(one).read_text() for number, one in enumerate(written)] == [True] * 4
    assert len(os.listdir(tmp_path)) == 4
    with open(tmp_path / "other", "w"):
        assert stat.S_IMODE(os.stat(path).st_mode) == stat.S_IMODE(os.stat(tmp_path / "other").st_mode)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = str(tmp_path / "t.json")
    chrome.write(path, {"traceEvents": [1]})
    before = Path(path).read_text()
    with pytest.raises(TypeError):
        chrome.write(path, {"traceEvents": [2, object()]})
    assert Path(path).read_text() == before and os.listdir(tmp_path) == ["t.json"]
