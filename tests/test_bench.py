"""`outrider bench`: that every bench runs, the form of its rows, the verdicts, the files. Never a time."""

import contextlib
import importlib
import io
import itertools
import json
import math
import os
import statistics
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from outrider.scheduler.slots import Slots
from outrider.tools.bench.chains import relu_chain
from outrider.tools.bench.command import BENCHES
from outrider.tools.bench.marks import Marks, Point
from outrider.tools.bench.measure import Budget, Request, Round, Row, differences, interleave, judged, row, summary
from outrider.tools.bench.plot import svg
from outrider.tools.cli import main

PACKAGES = {"outrider", "numpy", "onnx", "onnxruntime", "pyzmq", "msgpack"}
SVG = "{http://www.w3.org/2000/svg}"


# Rows that must be there.
SHOWN = {
    "hop": ["ZeroMQ ROUTER/DEALER echo", "multiprocessing.Pipe echo", "eventfd relay (the floor)", "1 partition",
            "4 partitions", "each further partition", "1 partition, two shapes in turn", "1 partition, outputs named",
            "1 partition, 12 shapes in turn: the general path"],
    "flight": ["two null stages, run from 8 threads", "two cpu stages, run from 4 threads"],
    "stages": ["two stages by pins, 4 in flight", "strategy pipeline, 4 in flight", "strategy replicate, 2 in flight"],
    "start": ["cpu: first run"],
    "crash": ["a cpu worker starts", "SIGKILL in a run -> WorkerDiedError", "SIGKILL in a run -> right result",
              "SIGKILL in a run -> right result, with a spare", "SIGKILL of an idle worker -> right result"],
}  # fmt: skip


def bench(*arguments):
    """(exit code, standard output, standard error) of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["bench", *arguments])
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_measures_and_leaves_nothing(name, tmp_path):
    code, out, err = bench(
        name, "--quick", "--rounds", "1", "--json", "--save", str(tmp_path), "--plot", str(tmp_path / "p.svg")
    )
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["bench"] == name
    assert document["machine"]["cores"] >= 1 and document["machine"].keys() >= PACKAGES
    rows = document["rows"]
    measured = [one for one in rows if one["value"] is not None]
    assert measured and all(math.isfinite(one["value"]) and one["unit"] for one in measured)
    assert all(one["note"] for one in rows if one["value"] is None)  # why not
    assert all(one["budget"] and one["verdict"] for one in rows if one["met"] is not None)
    assert any(one["ratio"] is not None for one in measured)
    assert {one["what"] for one in measured} >= set(SHOWN.get(name, ()))
    # What is counted does not depend on time: nothing more than the design allows.
    assert [one for one in measured if one["unit"] in ("copies/run", "bytes/run") and not one["met"]] == []
    assert json.loads((tmp_path / f"{name}.json").read_text()) == document
    text = (tmp_path / f"{name}.txt").read_text()
    assert all(one["what"] in text for one in rows) and "cores" in text
    assert (tmp_path / "p.svg").read_text() == (tmp_path / f"{name}.svg").read_text()
    drawn = ElementTree.parse(tmp_path / "p.svg").getroot()
    labels = [one.text for one in drawn.iter(f"{SVG}text")]
    assert all(one["what"] in labels for one in measured)


def test_a_runtime_measures_itself_in_its_own_process_and_says_why_it_refuses(tmp_path):
    runtimes = importlib.import_module("outrider.tools.bench.runtimes")
    model, feed = tmp_path / "m.onnx", str(tmp_path / "f.npz")
    model.write_bytes(relu_chain(2, [16]).SerializeToString())
    np.savez(feed, x=np.zeros(16, np.float32))
    with runtimes.opened(runtimes.SPINS, str(model), feed, 1) as opened:
        taken = opened.sample(3)
        assert len(taken) == 3 and min(*taken, opened.ready, opened.first) > 0
    model.write_bytes(b"no model")
    refused = pytest.raises(runtimes.RuntimeRefusal, match="InvalidProtobuf")
    with refused, runtimes.opened(runtimes.SPINS, str(model), feed, 1):
        pass


@pytest.mark.parametrize(
    "arguments",
    [
        ["hop", "--rounds", "0"], ["hop", "model.onnx"], ["hop", "--feeds", "."], ["models", "@nothing"],
        ["models", "--feeds", "nowhere"], ["hop", "--plot", "rows.gif"], ["hop", "--plot", "nowhere/rows.svg"],
        ["hop", "--save", __file__], ["hop", "--providers-file", __file__], ["models", "--providers-file", __file__],
    ],
)  # fmt: skip
def test_bad_usage(arguments):
    code, out, err = bench(*arguments)
    assert code == 2 and out == "" and err


@pytest.mark.parametrize(
    ("budget", "value", "ratio", "verdict"),
    [
        (Budget(value=35), 35, None, "met"),
        (Budget(value=35), 70, None, "missed by 2 x"),
        (Budget(value=35, ratio=0.4), 20, 0.6, "missed by 1.5 x"),
        (Budget(value=35, ratio=0.4), 70, 0.6, "missed by 2 x"),
        (Budget(value=35, ratio=0.4), 30, 0.3, "met"),
        (Budget(ratio=1.7, floor=True), 9, 1.7, "met"),
        (Budget(ratio=1.7, floor=True), 9, 0.85, "missed by 2 x"),
        (Budget(value=0), 0, None, "met"),
        (Budget(value=0), 1, None, "missed by inf x"),
    ],
)
def test_verdicts(budget, value, ratio, verdict):
    judgement = judged(Row("r", value, "us", ratio=ratio), budget)
    assert judgement.verdict == verdict and judgement.met == (verdict == "met")


def test_rows_without_a_figure_or_a_budget_have_no_verdict():
    assert judged(Row("r", None, "us", note="absent"), Budget(value=1)).met is None
    assert judged(Row("r", 1.0, "us"), None).verdict == ""


def test_a_row_is_the_median_of_rounds_and_of_ratios_within_a_round():
    taken = [Round(10, 20), Round(30, 40), Round(20, 90)]
    base = [Round(10), Round(10), Round(5)]
    made = row("r", "us", taken, base, "base", Budget(value=25, ratio=2))
    assert (made.value, made.p99, made.low, made.high) == (20, 40, 10, 30)
    assert made.ratio == statistics.median([1, 3, 4])
    assert made.verdict == "missed by 1.5 x"
    assert [one.p50 for one in differences(taken, base, 5)] == [0, 4, 3]


def test_variants_are_interleaved_there_and_back():
    order = []

    def sample(name):
        def take(calls):
            order.append((name, calls))
            return [1.0] * calls

        return take

    taken = interleave({"a": (sample("a"), 6), "b": (sample("b"), 12)}, rounds=2)
    assert order == [("a", 1), ("a", 6), ("b", 2), ("b", 12), ("b", 2), ("b", 12), ("a", 1), ("a", 6)]
    assert {name: len(rounds) for name, rounds in taken.items()} == {"a": 2, "b": 2}


def test_few_calls_have_a_median_and_no_percentile():
    assert summary([3, 1, 2]) == Round(2)
    assert summary(range(1, 201)) == Round(100.5, 199)


def test_calls_of_a_quick_look():
    assert Request().calls(600) == 600
    assert 2 <= Request(quick=True).calls(600) < 60


def test_a_plot_escapes_names_and_uses_a_logarithmic_axis_for_what_differs_much():
    rows = [Row("a < b & c", 1.0, "us", low=0.9, high=1.2), Row("far", 5000.0, "us"), Row("zero", 0.0, "copies")]
    drawn = ElementTree.fromstring(svg([("hop", rows)]))
    texts = [one.text for one in drawn.iter(f"{SVG}text")]
    assert "a < b & c" in texts and "us (logarithmic)" in texts and "copies" in texts
    widths = [float(one.get("width")) for one in drawn.iter(f"{SVG}rect")][1:]
    assert widths[0] < widths[1] and widths[2] == 1


def test_a_profile_follows_the_path_and_leaves_the_library_as_it_was():
    held = (os.eventfd_read, os.eventfd_write, Slots.take)
    _, out, _ = bench("profile", "--quick", "--rounds", "1", "--json")
    rows = json.loads(out)["rows"]
    names = [one["what"] for one in rows]
    path = names[: names.index("the run with marks")]
    actors = [name.split(": ")[0] for name in path]
    walk = [actor for actor, _ in itertools.groupby(actors)]
    assert walk == ["caller", "wake-up", "worker 1", "wake-up", "worker 2", "wake-up", "caller"]
    assert [name for name in path if "wake-up" in name] == [
        "wake-up: caller -> worker 1", "wake-up: worker 1 -> worker 2", "wake-up: worker 2 -> caller",
    ]  # fmt: skip
    assert {"caller: feed checked", "worker 1: layouts compared", "caller: results copied"} < set(path)
    assert held == (os.eventfd_read, os.eventfd_write, Slots.take)


def test_marks_name_what_the_library_has():
    marks = Marks()
    with pytest.raises(AttributeError, match="no_such"):
        marks.install([Point("outrider.shm.doorbell:Doorbell.no_such")])
    marks.install([Point("os:getpid", "asked", "answered")])
    assert os.getpid() and marks.take()["names"] == ["asked", "answered"]
    marks.remove()
    assert os.getpid() and marks.take() == {"names": [], "times": []}
