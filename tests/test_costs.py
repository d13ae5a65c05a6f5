"""Estimated costs of nodes. Oracle: operations and bytes counted by hand."""

import numpy as np
import pytest

from outrider.scheduler.costs import BYTES, CALL, FLOPS, Crossing, estimate, measured, node_cost
from outrider.scheduler.model import load_model
from tests.builders import model, node, tensor

pytestmark = pytest.mark.fast

CROSSING = Crossing(hop=20e-6, byte=1e-10)


def plain(nodes, inputs, outputs, constants=None):
    loaded = load_model(model(nodes, inputs, outputs, constants).SerializeToString(), None)
    loaded.store.close()
    return loaded.graph


def only(operator, shapes, out, constants=None, **attributes):
    names = [f"i{k}" for k in range(len(shapes))] + list(constants or {})
    one = node(operator, " ".join(names), "y", "n", **attributes)
    inputs = [tensor(name, shape) for name, shape in zip(names, shapes, strict=False)]
    return plain([one], inputs, [tensor("y", out)], constants).nodes[0]


def zeros(*shape):
    return np.zeros(shape, np.float32)


def test_products_and_convolutions_cost_their_operations():
    one = only("MatMul", [(64, 512)], (64, 256), {"w": zeros(512, 256)})
    assert node_cost(one).seconds == pytest.approx(CALL + 2 * 64 * 512 * 256 / FLOPS)
    turned = only("Gemm", [(512, 64)], (64, 256), {"w": zeros(512, 256)}, transA=1)
    assert node_cost(turned) == node_cost(one)
    conv = only("Conv", [(1, 32, 40, 40)], (1, 64, 38, 38), {"w": zeros(64, 8, 3, 3)}, group=4)
    assert node_cost(conv).seconds == pytest.approx(CALL + 2 * 64 * 38 * 38 * 8 * 9 / FLOPS)
    gates = {"w": zeros(2, 4 * 128, 64), "r": zeros(2, 4 * 128, 128)}
    lstm = only("LSTM", [(50, 4, 64)], None, gates, hidden_size=128, direction="bidirectional")
    assert node_cost(lstm).seconds == pytest.approx(CALL + 2 * 50 * 4 * 2 * 4 * 128 * (64 + 128) / FLOPS)
    contracted = only("Einsum", [(8, 64, 32), (8, 32, 16)], (8, 64, 16), equation="bij,bjk->bik")
    assert node_cost(contracted).seconds == pytest.approx(CALL + 2 * 8 * 64 * 32 * 16 / FLOPS)


def test_the_rest_costs_the_bytes_that_it_moves():
    one = only("Add", [(1000, 1000), (1000, 1000)], (1000, 1000))
    assert node_cost(one).seconds == pytest.approx(CALL + 3 * 4e6 / BYTES)
    assert node_cost(one).exact


def test_a_view_costs_a_call_whatever_its_shape():
    one = only("Flatten", [("N", 1000)], ("N", 1000))
    assert (node_cost(one).seconds, node_cost(one).exact) == (CALL, True)


@pytest.mark.parametrize(
    "one",
    [
        only("Relu", [("N", 1000)], ("N", 1000)),
        only("MatMul", [("N", 512)], ("N", 256), {"w": zeros(512, 256)}),
        only("Einsum", [(8, 4), (8, 4)], (8,), equation="...i,...i->..."),
        plain([node("Neg", "x", "y", "n", domain="com.x")], [tensor("x", (4,))], [tensor("y", (4,))]).nodes[0],
    ],
    ids=["symbol", "symbol of a product", "ellipsis", "unknown operator"],
)
def test_an_unknown_part_makes_it_a_lower_bound(one):
    assert not node_cost(one).exact
    assert node_cost(one).seconds >= CALL


def test_constant_nodes_cost_nothing_in_a_run_and_unknown_sizes_are_left_out():
    graph = plain(
        [node("Neg", "w", "c", "constant"), node("Add", "x c", "m", "a"), node("Relu", "m", "y", "r")],
        [tensor("x", ("N", 4))], [tensor("y", ("N", 4))], {"w": zeros(4)},
    )  # fmt: skip
    costs = estimate(graph, CROSSING)
    assert costs.nodes[0].seconds == 0
    assert costs.nbytes == {"c": 16}


def test_sizes_take_the_place_of_symbols():
    graph = plain([node("Relu", "x", "y", "r")], [tensor("x", ("N", 1000))], [tensor("y", ("N", 1000))])
    costs = estimate(graph, CROSSING, {"N": 8})
    assert costs.nodes[0].seconds == pytest.approx(CALL + 2 * 4 * 8000 / BYTES)
    assert costs.nodes[0].exact
    assert costs.nbytes == {"y": 4 * 8000}
    assert not estimate(graph, CROSSING, {"M": 8}).nodes[0].exact


def test_what_was_measured_is_shared_out_by_the_estimates_and_exact():
    graph = plain(
        [node("Flatten", "x", "m", "f"), node("Relu", "m", "k", "r"), node("Neg", "k", "y", "n")],
        [tensor("x", ("N", 4))], [tensor("y", ("N", 4))],
    )  # fmt: skip
    costs = estimate(graph, CROSSING)
    learned = measured(costs, [([0, 1], 1e-3)])
    assert sum(one.seconds for one in learned.nodes[:2]) == pytest.approx(1e-3)
    assert learned.nodes[1].seconds / learned.nodes[0].seconds == pytest.approx(
        costs.nodes[1].seconds / costs.nodes[0].seconds
    )
    assert [one.exact for one in learned.nodes] == [True, True, False]
    assert learned.nodes[2] == costs.nodes[2]
