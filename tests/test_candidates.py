"""Who claimed each node, at what cost, who declined it and why; and why a provider got nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from outrider.providers.wire.graph import Graph, Node
from outrider.scheduler import InferenceSession, SessionOptions
from outrider.scheduler.candidates import claimed_costs
from outrider.scheduler.costs import NodeCost
from outrider.scheduler.placement import Answers
from outrider.tools.cli import main
from tests.builders import chain

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
COSTLY, PICKY = f"{FILE}:Costly", f"{FILE}:Picky"


def test_each_node_tells_who_wanted_it_and_who_did_not() -> None:
    providers = [f"{COSTLY}?cost=0.25", f"{PICKY}?operator=Exp", "cpu", "null"]
    with InferenceSession(chain("Relu", "Neg", shape=(2, 4)), providers=providers) as session:
        report = session.placement()
    relu, neg = report.to_dict()["nodes"]
    assert [one["provider"] for one in relu["claims"]] == [COSTLY, "cpu", "null"]
    assert relu["claims"][0] == {"provider": COSTLY, "cost": 0.25, "source": "claimed", "exact": True}
    assert relu["claims"][1]["source"] == "estimated" and 0 < relu["claims"][1]["cost"] < 1e-3
    assert relu["declines"] == [{"provider": PICKY, "reason": "only Exp on 0"}]
    assert [one["provider"] for one in neg["claims"]] == ["cpu", "null"] and neg["provider"] == "cpu"
    assert neg["declines"][0] == {"provider": COSTLY, "reason": "not claimed"}
    told = {one["name"]: one for one in report.to_dict()["providers"]}
    assert told["cpu"]["operators"] == {"ai.onnx::Neg": 1}
    assert told[PICKY]["reason"] == "it claims none of the nodes: only Exp on 0"
    assert told["null"]["reason"] == f"all that it claims went to {COSTLY}, cpu"
    page = report.to_html()
    assert "250 ms claimed" in page and "Picky: only Exp on 0" in page


def test_what_was_measured_is_told_of_who_was_measured() -> None:
    with InferenceSession(chain("Exp", "Neg", shape=("N", 64)), SessionOptions(strategy="cost"), ["cpu", "cpu:1"]) as s:
        before = s.placement().nodes
        s.warmup({"x": (512, 64)})
        after = s.placement().nodes
    assert [(one.source, one.exact) for one in before[0].claims] == [("estimated", False)] * 2
    assert [(one.source, one.exact) for one in after[0].claims] == [("measured", True), ("estimated", True)]
    assert after[0].claims[1].cost > before[0].claims[1].cost  # since the size is known


def test_what_was_taken_back_is_a_decline_with_its_reason() -> None:
    with InferenceSession(chain("Relu", "Neg"), providers=[f"{FILE}:Wrong?how=compile", "cpu"]) as session:
        report = session.placement()
    relu = report.nodes[0]
    assert [one.provider for one in relu.claims] == ["cpu"] and relu.provider == "cpu"
    assert "this Relu is too big for me" in relu.declines[0].reason
    (told,) = [one for one in report.providers if one.nodes == 0]
    assert told.reason.startswith("it could not compile what it claimed: ") and "too big" in told.reason


def test_inspect_lists_nodes_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(chain("Relu", "Neg", "Relu").SerializeToString())
    monkeypatch.setenv("OUTRIDER_PROVIDERS", f"{COSTLY}?cost=2e-6,cpu")
    assert main(["inspect", str(path), "--nodes", "n[12]"]) == 0
    table = capsys.readouterr().out.splitlines()[-3:]
    assert table[0].split("  ")[0] == "node" and "declined by" in table[0]
    assert [line.split()[0] for line in table[1:]] == ["n1", "n2"]
    assert "Costly: not claimed" in table[1] and "cpu: at least" in table[1] and "2 µs claimed" in table[2]
    assert main(["inspect", str(path), "--nodes", "n9"]) == 2
    assert "no node" in capsys.readouterr().err
    monkeypatch.setenv("OUTRIDER_PROVIDERS", "null")  # over which what is given wins
    listed = tmp_path / "providers.toml"
    listed.write_text(f'[[provider]]\nkind = "{COSTLY}"\noptions = {{ cost = 2e-6 }}\n[[provider]]\nkind = "cpu"\n')
    assert main(["inspect", str(path), "--providers-file", str(listed), "--json"]) == 0
    found = [[one["provider"] for one in node["claims"]] for node in json.loads(capsys.readouterr().out)["nodes"]]
    assert found == [[COSTLY, "cpu"], ["cpu"], [COSTLY, "cpu"]]


@pytest.mark.fast
def test_the_cost_of_a_claim_is_shared_out_among_its_nodes() -> None:
    answers = Answers(claims=[(0, ("n0", "n2"), 4.0), (1, ("n1",), None), (2, ("n1", "gone"), 1.0)])
    nodes = tuple(Node(i, f"n{i}", "Relu", "", 21, {}, (), ()) for i in range(3))
    shares = claimed_costs(
        answers, Graph("g", nodes, (), (), {}, {"": 21}), [NodeCost(s, True) for s in (3.0, 0.0, 1.0)]
    )
    assert shares == {(0, "n0"): 3.0, (0, "n2"): 1.0, (2, "n1"): 1.0}
    np.testing.assert_allclose(sum(shares[0, name] for name in ("n0", "n2")), 4.0)
