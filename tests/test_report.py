"""The placement report: its exact format, grouping in a fixed order, text and page."""

import json
import random
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.report import (
    NodeClaim,
    NodeDecline,
    PlacedNode,
    PlacedPartition,
    PlacedProvider,
    PlacementReport,
    Refusal,
    Transfer,
    format_bytes,
    format_seconds,
    group_declines,
)

pytestmark = pytest.mark.fast

REFUSALS = [
    Refusal("node#2", "Conv", "", "null", "output shape not known"),
    Refusal("node#12", "Conv", "", "null", "output shape not known"),
    Refusal("node#0", "Conv", "", "null", "output shape not known"),
    Refusal("node#7", "Conv", "", "null", "output shape not known"),
    Refusal("node#2", "Conv", "", "cpu", "group"),
    Refusal("node#3", "Conv", "", "null", "something else"),
    Refusal("a", "Add", "com.x", "cpu", "no kernel"),
]
CLAIMS = (
    NodeClaim("cpu", 2.5e-3, "measured"), NodeClaim("cpu:1", 1.5e-6, "estimated", exact=False),
    NodeClaim("mine", 0.25, "claimed"),
)  # fmt: skip
REPORT = PlacementReport(
    partitions=[PlacedPartition(0, "cpu", ("a", "b"), 1536), PlacedPartition(1, "cpu:1", ("<c>",), 0)],
    nodes=[
        PlacedNode("k", "Add", "", None, None),
        PlacedNode("a", "Conv", "", "cpu", 0, False, CLAIMS, (NodeDecline("null", "shape not known"),)),
        PlacedNode("b", "Foo", "com.x", "cpu", 0, reference=True),
        PlacedNode("<c>", "Relu", "", "cpu:1", 1),
    ],
    transfers=[Transfer("x", "caller", "cpu", 64), Transfer("m", "cpu", "cpu:1", None)],
    declines=group_declines(REFUSALS),
    providers=[
        PlacedProvider("cpu", "running", 2, 1536, operators=(("ai.onnx::Conv", 1), ("com.x::Foo", 1))),
        PlacedProvider("cpu:1", "running", 1, 0),
        PlacedProvider("null", "absent", reason="no such module"),
    ],
    notes=["the pin 'k' matches constants only and has no effect"],
)


def test_to_dict_is_the_documented_format():
    got = REPORT.to_dict()
    assert json.loads(json.dumps(got)) == got
    assert list(got) == ["partitions", "nodes", "transfers", "declines", "providers"]
    assert got["partitions"] == [
        {"id": 0, "provider": "cpu", "nodes": ["a", "b"], "weight_bytes": 1536},
        {"id": 1, "provider": "cpu:1", "nodes": ["<c>"], "weight_bytes": 0},
    ]
    assert got["nodes"][0] == {
        "name": "k", "op": "Add", "domain": "ai.onnx", "provider": None, "partition": None, "reference": False,
        "claims": [], "declines": [],
    }  # fmt: skip
    assert got["nodes"][1]["claims"] == [
        {"provider": "cpu", "cost": 2.5e-3, "source": "measured", "exact": True},
        {"provider": "cpu:1", "cost": 1.5e-6, "source": "estimated", "exact": False},
        {"provider": "mine", "cost": 0.25, "source": "claimed", "exact": True},
    ]
    assert got["nodes"][1]["declines"] == [{"provider": "null", "reason": "shape not known"}]
    assert got["nodes"][2] == {
        "name": "b", "op": "Foo", "domain": "com.x", "provider": "cpu", "partition": 0, "reference": True,
        "claims": [], "declines": [],
    }  # fmt: skip
    assert got["transfers"] == [
        {"value": "x", "from": "caller", "to": "cpu", "bytes": 64},
        {"value": "m", "from": "cpu", "to": "cpu:1", "bytes": None},
    ]
    assert got["declines"][-1] == {
        "domain": "com.x", "op": "Add", "provider": "cpu", "reason": "no kernel", "count": 1, "examples": ["a"],
    }  # fmt: skip
    assert got["providers"][0]["operators"] == {"ai.onnx::Conv": 1, "com.x::Foo": 1}
    assert got["providers"][2] == {
        "name": "null", "state": "absent", "reason": "no such module", "nodes": 0, "weight_bytes": 0, "operators": {},
    }  # fmt: skip


def test_what_is_wrong_with_a_provider_is_told():
    report = PlacementReport(
        providers=[
            PlacedProvider("a", "back-off", 1, seconds=2.2),
            PlacedProvider("b", "open", 0, 0, "n1 runs elsewhere", 59.5, (("n1", "n2"), ("n9",))),
            PlacedProvider("c", "failed", reason="no device"),
        ]
    )
    assert [line.split("  ")[-1] for line in str(report).splitlines()[1:]] == [
        "back-off (3 s): 1 node, weights 0 B",
        "open (60 s), quarantined: n1, n2; n9: got nothing, since n1 runs elsewhere",
        "failed (no device): got nothing",
    ]
    assert report.to_dict()["providers"][1:] == [
        {
            "name": "b", "state": "open", "reason": "n1 runs elsewhere", "nodes": 0, "weight_bytes": 0,
            "operators": {}, "seconds": 59.5, "quarantined": [["n1", "n2"], ["n9"]],
        },
        {
            "name": "c", "state": "failed", "reason": "no device", "nodes": 0, "weight_bytes": 0, "operators": {},
        },
    ]  # fmt: skip
    page = report.to_html()
    for words in ("back-off (3 s)", "open (60 s), quarantined: n1, n2; n9: n1 runs elsewhere", "failed (no device)"):
        assert words in page


def test_declines_are_grouped_in_a_fixed_order():
    groups = group_declines(REFUSALS)
    assert [(one.domain, one.op, one.provider, one.reason, one.count) for one in groups] == [
        ("ai.onnx", "Conv", "cpu", "group", 1),
        ("ai.onnx", "Conv", "null", "output shape not known", 4),
        ("ai.onnx", "Conv", "null", "something else", 1),
        ("com.x", "Add", "cpu", "no kernel", 1),
    ]
    assert groups[1].examples == ("node#0", "node#12", "node#2")
    for seed in range(20):
        shuffled = list(REFUSALS)
        random.Random(seed).shuffle(shuffled)
        assert group_declines(shuffled) == groups


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.builds(Refusal, *[st.sampled_from("abc")] * 4, st.sampled_from(["r", "s"])), max_size=40), st.data())
def test_no_refusal_is_lost_in_the_groups(refusals, data):
    groups = group_declines(refusals)
    assert group_declines(data.draw(st.permutations(refusals))) == groups
    assert sum(one.count for one in groups) == len(refusals)
    keys = [(one.domain, one.op, one.provider, one.reason) for one in groups]
    assert keys == sorted(set(keys))
    for one, key in zip(groups, keys, strict=True):
        names = sorted(r.node for r in refusals if (r.domain, r.op, r.provider, r.reason) == key)
        assert (one.count, list(one.examples)) == (len(names), names[:3])


def test_nodes_are_found_by_name_or_pattern():
    assert [one.name for one in REPORT.matching("a")] == ["a"]
    assert [one.name for one in REPORT.matching("[ab]")] == ["a", "b"]
    assert [one.name for one in REPORT.matching("*")] == ["k", "a", "b", "<c>"]
    assert REPORT.matching("nothing") == []
    places = ["constant", "cpu, partition 0", "cpu, partition 0 (onnx.reference)", "cpu:1, partition 1"]
    assert [one.place for one in REPORT.nodes] == places


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0"), (2e-9, "2 ns"), (3.25e-6, "3.25 µs"), (0.0015, "1.5 ms"), (75.0, "75 s")]
)
def test_seconds_as_people_write_them(seconds, text):
    assert format_seconds(seconds) == text


def test_text_names_what_matters():
    text = str(REPORT)
    assert text.splitlines()[0] == "4 nodes, 1 of them constant, in 2 partitions on 2 providers"
    assert "null   absent (no such module): got nothing" in text
    assert "cpu    running: 2 nodes, weights 1.5 KiB" in text
    assert "m: cpu -> cpu:1, size not known" in text
    assert "ai.onnx::Conv declined by null: output shape not known [4: node#0, node#12, node#2, ...]" in text
    assert "Served by onnx.reference" in text
    assert "the pin 'k' matches constants only" in text
    assert REPORT.reference_nodes == ["b"]
    assert REPORT.idle_providers == ["null"]


def test_long_lists_end_but_reasons_do_not():
    names = tuple(f"n{i}" for i in range(5000))
    report = PlacementReport(
        partitions=[PlacedPartition(i, "cpu", names) for i in range(100)],
        transfers=[Transfer(f"t{i}", "caller", "cpu", i) for i in range(1000)],
        declines=group_declines(Refusal("n", f"Op{i:03}", "", "cpu", "no") for i in range(300)),
        providers=[PlacedProvider("cpu", "running", 5000)],
    )
    text = str(report)
    assert len(text) < 40_000
    assert text.count("declined by") == 300
    assert "... and 980 more" in text
    assert "t999" not in text


def test_empty_report():
    assert str(PlacementReport()) == "0 nodes in 0 partitions on 0 providers"
    assert "<table>" not in PlacementReport().to_html()


class Tags(HTMLParser):
    """Tags opened and closed, and the text between."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], set(), []

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        if tag not in ("meta", "line", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_well_formed_escaped_and_self_contained():
    page = REPORT.to_html(title="<model> & co")
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert {"svg", "rect", "table", "title"} <= tags.seen
    assert not tags.seen & {"script", "link", "img", "iframe", "c", "model"}
    assert "http" not in page
    text = "".join(tags.text)
    assert "<c>" in text
    assert "<model> & co" in text
    assert "no such module" in text


def test_page_of_a_large_model_is_bounded():
    nodes = [PlacedNode(f"n{i}", "Add", "", "cpu", 0) for i in range(20_000)]
    partitions = [PlacedPartition(i, "cpu", (f"n{i}",)) for i in range(20_000)]
    report = PlacementReport(partitions, nodes, providers=[PlacedProvider("cpu", "running", 1)])
    page = report.to_html()
    assert page.count("<rect") == 200
    assert "and 18,000 more" in page


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "size not known"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 40, "1.0 TiB"),
    ],
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text


def test_a_long_list_is_folded_on_the_page():
    nodes = tuple(f"n{i}" for i in range(9))
    page = PlacementReport([PlacedPartition(0, "cpu", nodes)], providers=[PlacedProvider("cpu", "ready", 9)]).to_html()
    assert "n3<details><summary>5 more</summary>n4<br>" in page and "n8</details>" in page
