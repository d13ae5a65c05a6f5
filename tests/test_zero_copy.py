"""Arrays of the caller's are read and written where they lie; whatever does not allow that costs one counted copy."""

from __future__ import annotations

import gc
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from outrider.scheduler import Fleet, InferenceSession, OrtValue, SessionOptions, errors
from outrider.scheduler.inplace import FORGOTTEN, PLACES, Admission, disjoint
from outrider.scheduler.runner import Runner
from outrider.shm.segment import address_of
from outrider.shm.user import process_memory
from tests.builders import chain, model, node, tensor
from tests.gates import end
from tests.leaks import worker_pids

LARGE = 1 << 15  # float32 elements: results of this size are leased, smaller ones copied
SIZES = (6, LARGE)
TOUCHY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py") + ":Touchy"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(["cpu", "cpu:1", TOUCHY]) as made:
        yield made


def numbers(count: int, start: float = -3) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.float32)


def copies(session: InferenceSession, run: Callable[[], Any]) -> int:
    before = session.stats()["copies"]
    run()
    count: int = session.stats()["copies"] - before
    return count


def split(fleet: Fleet, first: str = "cpu", fed: bool = False, **options: Any) -> InferenceSession:
    """v = relu(x) on one worker; y = -v and z = v + w on another, v is a result too. w is 2, or may be fed."""
    nodes = [node("Relu", "x", "v", "first"), node("Neg", "v", "y", "second"), node("Add", "v w", "z", "third")]
    made = model(
        nodes,
        [tensor("x", ["N"]), *([tensor("w", [1])] if fed else [])],
        [tensor("y", ["N"]), tensor("z", ["N"]), tensor("v", ["N"])],
        {"w": np.array([2], np.float32)},
    )
    pins = {"first": first, "second": "cpu:1", "third": "cpu:1"}
    return InferenceSession(made, options=SessionOptions(fleet=fleet, pins=pins, **options))


def bind(session: InferenceSession, feed: dict[str, Any], **outputs: np.ndarray | None) -> Any:
    binding = session.io_binding()
    for name, value in feed.items():
        binding.bind_cpu_input(name, value)
    for name, target in outputs.items():
        if target is None:
            binding.bind_output(name)
        else:
            binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(target))
    return binding


# No copies -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_copied_between_a_caller_and_two_workers(fleet: Fleet, size: int) -> None:
    with split(fleet) as session:
        x, y, z = (session.empty(name, [size]) for name in ("x", "y", "z"))
        binding = bind(session, {"x": x}, y=y, z=z)

        def run(step: int) -> None:
            x[...] = numbers(size, step - 3)
            y[...] = z[...] = np.nan
            session.run_with_iobinding(binding)
            np.testing.assert_array_equal(y, -np.maximum(x, 0))
            np.testing.assert_array_equal(z, np.maximum(x, 0) + 2)
            assert [value.data_ptr() for value in binding.get_outputs()] == [address_of(y), address_of(z)]

        assert copies(session, lambda: run(0)) == 0
        run(1)
        before = session.stats()
        for step in range(2, 40):
            run(step)
        after = session.stats()
        assert after["copies"] == before["copies"]
        assert after["copied_bytes"] == before["copied_bytes"]
        assert after["allocated_bytes"] == before["allocated_bytes"]
        for name, counters in after["providers"].items():
            assert counters.get("bound") == before["providers"][name].get("bound")


def test_results_of_this_session_are_inputs_without_a_copy(fleet: Fleet) -> None:
    with split(fleet) as session:
        result = session.run(["z"], {"x": numbers(LARGE)})[0]
        for step in range(6):
            before = session.stats()["copies"]
            following = session.run(["z"], {"x": result})[0]
            assert session.stats()["copies"] == before, step
            np.testing.assert_array_equal(following, np.maximum(result, 0) + 2)
            result = following


# Those that are not copied first: small inputs that come in turn with others that are copied are copied, too.
VIEWS: dict[str, tuple[Callable[[np.ndarray], Any], int]] = {
    "itself": (lambda x: x, 0),
    "64 bytes further": (lambda x: x[16:], 0),
    "DLPack": (lambda x: np.from_dlpack(x), 0),
    "OrtValue": (lambda x: OrtValue.ortvalue_from_numpy(x), 0),
    "OrtValue of DLPack": (lambda x: OrtValue.from_dlpack(x[32:]), 0),
    "memoryview": (lambda x: memoryview(x), 0),
    "view of a view": (lambda x: x.view(np.uint32).view(np.float32), 0),
    "32 bytes further": (lambda x: x[8:], 1),
    "every second": (lambda x: x[::2], 1),
    "backwards": (lambda x: x[::-1], 1),
    "nothing": (lambda x: x[:0], 1),
    "a copy": (lambda x: np.array(x), 1),
}


@pytest.mark.parametrize("size", [80, LARGE])
def test_what_is_read_where_it_lies(fleet: Fleet, size: int) -> None:
    with split(fleet) as session:
        x = session.empty("x", [size])
        for name, (view, expected) in VIEWS.items():
            for step in range(3):
                x[...] = numbers(size, step)
                found: list[Any] = []
                count = copies(session, lambda: found.append(session.run(["v"], {"x": view(x)})[0]))  # noqa: B023
                # v goes to the other worker too, so it is copied for the caller
                assert count == expected + 1, name
                np.testing.assert_array_equal(found[0], np.maximum(np.asarray(view(x)), 0), err_msg=name)


def test_memory_of_the_process_serves_every_session(fleet: Fleet) -> None:
    value = OrtValue.ortvalue_from_shape_and_type([LARGE], np.float32)
    value.update_inplace(numbers(LARGE))
    with split(fleet) as one, split(fleet) as other:
        for session in (one, other):
            assert copies(session, lambda: session.run(["z"], {"x": value})) == 0  # noqa: B023
        mine = one.empty("x", (LARGE,))
        assert copies(other, lambda: other.run(["z"], {"x": mine})) == 0
    assert process_memory().segment.offset_of(mine) is not None


@pytest.mark.parametrize("size", SIZES)
def test_arrays_of_one_form_take_turns(fleet: Fleet, size: int) -> None:
    """All have one signature; some are read where they lie, some copied."""
    with split(fleet, max_in_flight=1) as session:
        arrays = [session.empty("x", [size]), session.empty("x", [size]), np.empty(size, np.float32)]
        for step, which in enumerate([0, 0, 0, 1, 1, 0, 1, 2, 2, 2, 0, 2, 1, 1, 1]):
            x = arrays[which]
            x[...] = step
            results: list[np.ndarray] = []
            count = copies(session, lambda: results.extend(session.run(None, {"x": x})))  # noqa: B023
            assert [(one == value).all() for one, value in zip(results, (-step, step + 2, step), strict=True)]
            if size == LARGE:
                assert count == 1 + (which == 2)  # v, which the other worker reads too


def test_a_caller_with_ever_new_arrays_gets_right_answers(fleet: Fleet) -> None:
    with split(fleet, max_in_flight=1) as session:
        ring = [session.empty("x", [LARGE]) for _ in range(PLACES + 6)]
        for step in range(3 * len(ring)):
            x = ring[step % len(ring)]
            x[...] = step
            (y,) = session.run(["y"], {"x": x})
            assert (y == -step).all()

        def turn() -> None:
            for x in ring:
                session.run(["y"], {"x": x})

        assert copies(session, turn) == 6


def test_which_places_are_admitted() -> None:
    admission = Admission()
    assert all(admission.admits((1, at)) for at in range(PLACES))
    assert not admission.admits((1, 99))
    for _ in range(FORGOTTEN):
        assert all(admission.admits((1, at)) for at in range(1, PLACES))
    assert admission.admits((1, 99))  # the place of (1, 0), which was forgotten
    assert not admission.admits((1, 0))


def test_which_bytes_overlap() -> None:
    spans = [(1, 64, 64), (2, 0, 10), (1, 512, 0)]
    for place in ((1, 0, 64), (1, 128, 9), (2, 64, 64), (1, 512, 4), (1, 70, 0)):
        assert disjoint(spans, *place)
    for place in ((1, 100, 1), (1, 0, 65), (1, 0, 500)):
        assert not disjoint(spans, *place)


# Bound outputs that cost a copy --------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("steps", [1, 4])
def test_other_memory_is_written_by_one_counted_copy(fleet: Fleet, size: int, steps: int) -> None:
    with split(fleet) as session:
        x = session.empty("x", [size])
        wide = np.zeros((size, 2), np.float32)
        leased = session.run(["y"], {"x": numbers(LARGE)})[0][:size]
        # What lies in the pool of z's worker counts as z's own; v is read by the other worker.
        targets = {
            "plain": ("y", np.zeros(size, np.float32), 1),
            "strided": ("y", wide[:, 1], 1),
            "user memory": ("y", OrtValue.ortvalue_from_shape_and_type([size], np.float32).numpy(), 1),
            "of another output": ("v", session.empty("y", [size]), 1),
            "of the same worker": ("z", session.empty("y", [size]), 0),
            "an earlier result": ("z", leased, 0 if size == LARGE else 1),
            "consumed elsewhere": ("v", session.empty("v", [size]), 1),
            "misaligned": ("y", session.empty("y", [size + 1])[1:], 1),
            "the input": ("y", x, 1),
        }
        for what, (name, target, expected) in targets.items():
            if what == "an earlier result" and size != LARGE:
                expected = 0  # a part of a leased result, at its start
            binding = session.io_binding()
            binding.bind_cpu_input("x", x)
            binding.bind_output(name) if target is None else binding._bind(name, OrtValue(target))
            for step in range(steps):
                x[...] = numbers(size, step)
                wanted = {"y": -np.maximum(x, 0), "z": np.maximum(x, 0) + 2, "v": np.maximum(x, 0)}[name]
                assert copies(session, lambda: session.run_with_iobinding(binding)) == expected, what  # noqa: B023
                np.testing.assert_array_equal(target, wanted, err_msg=what)
        assert (wide[:, 0] == 0).all()


def test_outputs_that_are_not_bound_are_results_as_ever(fleet: Fleet) -> None:
    with split(fleet) as session:
        x, y = session.empty("x", [LARGE]), session.empty("y", [LARGE])
        binding = bind(session, {"x": x}, z=None, y=y, v=None)
        kept = []
        for step in range(5):
            x[...] = step
            session.run_with_iobinding(binding)
            assert (y == -step).all()
            kept.append(binding.copy_outputs_to_cpu())
            plain = session.run(None, {"x": x})
            assert [one[0] for one in plain] == [-step, step + 2, step]
        for step, (z, y_copy, v) in enumerate(kept):
            assert (z == step + 2).all() and (y_copy == -step).all() and (v == step).all()


def test_bindings_change_between_runs(fleet: Fleet) -> None:
    with split(fleet, fed=True, max_in_flight=1) as session:
        x, y, z = (session.empty(name, [8]) for name in ("x", "y", "z"))
        other = np.zeros(8, np.float32)
        x[...] = numbers(8)
        binding = bind(session, {"x": x}, y=y)
        session.run_with_iobinding(binding)
        session.run_with_iobinding(binding)
        y[...] = 0
        binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(other))
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(other, -np.maximum(x, 0))
        binding.bind_ortvalue_output("z", OrtValue.ortvalue_from_numpy(z))
        binding.bind_cpu_input("w", np.array([5], np.float32))
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(z, np.maximum(x, 0) + 5)
        binding.clear_binding_inputs()
        binding.bind_cpu_input("x", numbers(3))
        with pytest.raises(errors.ShapeMismatchError):
            session.run_with_iobinding(binding)
        assert (y == 0).all()


def test_memory_that_does_not_fit_is_not_written(fleet: Fleet) -> None:
    with split(fleet, output_memory=3 << 20) as session:
        x, y = session.empty("x", [LARGE]), session.empty("y", [LARGE + 1])
        x[...] = y[...] = 5
        z = np.full(LARGE, 5, np.float32)
        for target in (y, y[:LARGE].reshape(2, -1), np.full(3, 5, np.float32)):
            for _ in range(12):  # no block of the pool is lost
                with pytest.raises(errors.ShapeMismatchError, match="'y' has shape") as caught:
                    session.run_with_iobinding(bind(session, {"x": x}, z=z, y=target))
            assert (caught.value.expected, caught.value.got) == ((LARGE,), target.shape)
            assert (target == 5).all() and (z == 5).all()
        held = [session.run(["y"], {"x": x})[0] for _ in range(10)]
        assert copies(session, lambda: session.run_with_iobinding(bind(session, {"x": x}, y=y[:LARGE]))) == 0
        assert (y[:LARGE] == -5).all() and y[LARGE] == 5
        del held


# The faults of others ------------------------------------------------------------------------------------------------
def branch() -> onnx.ModelProto:
    """y = x + 1 if c else -x, z = the sum of k doublings of x, by If and Loop; c, k and the capture x are inputs."""
    then = helper.make_graph([node("Add", "x one", "t")], "then", [], [tensor("t", None)])
    other = helper.make_graph([node("Neg", "x", "e")], "else", [], [tensor("e", None)])
    body = helper.make_graph(
        [node("Add", "a x", "b"), node("Identity", "on", "still")],
        "body",
        [tensor("i", [], TensorProto.INT64), tensor("on", [], TensorProto.BOOL), tensor("a", None)],
        [tensor("still", [], TensorProto.BOOL), tensor("b", None)],
    )
    nodes = [
        node("If", "c", "y", "pick", then_branch=then, else_branch=other),
        node("Loop", "k - x", "z", "turn", body=body),
        node("Shape", "x", "s", "ask"),
    ]
    inputs = [tensor("x", ["N"]), tensor("c", [], TensorProto.BOOL), tensor("k", [], TensorProto.INT64)]
    outputs = [tensor("y", None), tensor("z", None), tensor("s", [1], TensorProto.INT64)]
    return model(nodes, inputs, outputs, {"one": np.array([1], np.float32)})


def layouts() -> onnx.ModelProto:
    """Views and shape inputs: y = reshape(x, to), z = squeeze(x), t = transpose(-x), e = expand(f, to)."""
    nodes = [
        node("Reshape", "x to", "y", "pick"),
        node("Neg", "x", "n", "flip"),
        node("Transpose", "n", "t", "turn"),
        node("Unsqueeze", "x axes", "z", "ask"),
        node("Expand", "f to", "e", "grow"),
    ]
    inputs = [tensor("x", ["A", "B"]), tensor("to", [2], TensorProto.INT64), tensor("f", [1])]
    outputs = [tensor("y", None), tensor("z", None), tensor("t", None), tensor("e", None)]
    return model(nodes, inputs, outputs, {"axes": np.array([0], np.int64)})


def passing() -> onnx.ModelProto:
    """x and the initializers w (an input too) and k come back as they are; y = x + w."""
    inputs = [tensor("x", ["N"]), tensor("w", [3])]
    outputs = [tensor("x", ["N"]), tensor("w", [3]), tensor("k", [2]), tensor("y", ["N"])]
    constants = {"w": np.array([1, 2, 3], np.float32), "k": np.array([8, 9], np.float32)}
    return model([node("Add", "x w", "y", "pick")], inputs, outputs, constants)


X3 = np.array([1, -2, 3], np.float32)
SEEDS: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any], list[str]]] = {
    "control flow, one way": (branch, {"x": X3, "c": np.array(True), "k": np.array(3)}, ["y", "z", "s"]),
    "control flow, the other": (branch, {"x": X3, "c": np.array(False), "k": np.array(0)}, ["y", "z", "s"]),
    "views and shapes": (
        layouts,
        {"x": numbers(6).reshape(2, 3), "to": np.array([3, 2]), "f": np.array([7], np.float32)},
        ["y", "z", "t", "e"],
    ),
    "large views": (
        layouts,
        {"x": numbers(LARGE).reshape(2, -1), "to": np.array([4, LARGE // 4]), "f": np.array([7], np.float32)},
        ["y", "z", "t", "e"],
    ),
    "passed through": (passing, {"x": X3}, ["x", "w", "k", "y"]),
    "passed through, fed": (passing, {"x": X3, "w": X3 * 2}, ["x", "w", "k", "y"]),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("two", [False, True], ids=["one worker", "two workers"])
def test_whatever_makes_a_bound_output_writes_it_and_whatever_reads_a_bound_input_sees_it(
    fleet: Fleet, seed: str, two: bool
) -> None:
    make, feed, names = SEEDS[seed]
    pins = {"pick": "cpu:1", "turn": "cpu"} if two and make is not passing else {"pick": "cpu:1"} if two else {}
    with InferenceSession(make(), options=SessionOptions(fleet=fleet, pins=pins)) as session:
        wanted = dict(zip(names, session.run(names, feed), strict=True))
        for kind in ("its own", "plain", "value"):
            arrays: dict[str, np.ndarray] = {}
            for name, value in feed.items():
                arrays[name] = session.empty(name, value.shape) if kind != "plain" else np.empty_like(value)
            binding = session.io_binding()
            for name, array in arrays.items():
                binding.bind_cpu_input(name, array)
            targets: dict[str, np.ndarray] = {}
            for name, value in wanted.items():
                if kind == "its own":
                    targets[name] = session.empty(name, value.shape)
                elif kind == "value":
                    targets[name] = OrtValue.ortvalue_from_shape_and_type(value.shape, value.dtype).numpy()
                else:
                    targets[name] = np.empty_like(value)
                binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(targets[name]))
            for _ in range(3):
                for name, value in feed.items():
                    arrays[name][...] = value
                for target in targets.values():
                    target.view(np.uint8)[...] = 0xAB
                session.run_with_iobinding(binding)
                for name, value in wanted.items():
                    np.testing.assert_array_equal(targets[name], value, err_msg=f"{name}, {kind}")
                    np.testing.assert_array_equal(binding.get_outputs()[names.index(name)].numpy(), value)
                for name, value in feed.items():
                    np.testing.assert_array_equal(arrays[name], value)


def test_a_condition_a_count_and_a_shape_are_read_anew_by_each_run(fleet: Fleet) -> None:
    with InferenceSession(branch(), options=SessionOptions(fleet=fleet, pins={"turn": "cpu:1"})) as session:
        x, c, k = session.empty("x", [3]), session.empty("c", []), session.empty("k", [])
        binding = bind(session, {"x": x, "c": c, "k": k}, y=session.empty("y", [3]), z=session.empty("z", [3]))
        x[...] = X3
        for step in range(6):
            c[...] = step % 2
            k[...] = step
            session.run_with_iobinding(binding)
            y, z = binding.copy_outputs_to_cpu()
            np.testing.assert_array_equal(y, X3 + 1 if step % 2 else -X3)
            np.testing.assert_array_equal(z, X3 * (step + 1))
    with InferenceSession(layouts(), options=SessionOptions(fleet=fleet)) as session:
        x, to = session.empty("x", [2, 6]), session.empty("to", [2])
        x[...] = numbers(12).reshape(2, 6)
        binding = bind(session, {"x": x, "to": to, "f": np.ones(1, np.float32)}, y=None, e=None)
        for shape in ((3, 4), (12, 1), (4, 3), (3, 4)):
            to[...] = shape
            session.run_with_iobinding(binding)
            y, e = binding.copy_outputs_to_cpu()
            np.testing.assert_array_equal(y, x.reshape(shape))
            assert e.shape == shape


# Aliases -------------------------------------------------------------------------------------------------------------
def test_an_output_bound_over_its_input(fleet: Fleet) -> None:
    """Each step overwrites its own input, as a cache that is updated in place does."""
    with split(fleet) as session:
        for memory in ("x", "y"):
            state = session.empty(memory, [LARGE + 16])
            x, shifted = state[:LARGE], state[16:]
            x[...] = numbers(LARGE)
            binding = bind(session, {"x": x}, z=x)
            for _ in range(4):
                wanted = np.maximum(x, 0) + 2
                assert copies(session, lambda: session.run_with_iobinding(binding)) == 1  # noqa: B023
                np.testing.assert_array_equal(x, wanted)
            state[...] = numbers(LARGE + 16)
            wanted = -np.maximum(x, 0)
            session.run_with_iobinding(bind(session, {"x": x}, y=shifted))
            np.testing.assert_array_equal(shifted, wanted)


def test_an_input_that_is_passed_on_and_overwritten(fleet: Fleet) -> None:
    with InferenceSession(passing(), options=SessionOptions(fleet=fleet)) as session:
        x, kept = session.empty("x", [3]), np.zeros(3, np.float32)
        x[...] = X3
        session.run_with_iobinding(bind(session, {"x": x}, y=x, x=kept))
        np.testing.assert_array_equal(kept, X3)
        np.testing.assert_array_equal(x, X3 + [1, 2, 3])
        x[...] = X3
        binding = bind(session, {"x": x}, y=x, x=None)
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(binding.get_outputs()[1].numpy(), X3)


def test_one_array_for_two_inputs_and_one_pool_for_two_outputs(fleet: Fleet) -> None:
    with split(fleet, fed=True) as session:
        x = session.empty("x", [1])
        x[...] = 3
        both = session.empty("y", [32])
        binding = bind(session, {"x": x, "w": x}, y=both[:1], z=both[16:17])
        session.run_with_iobinding(binding)
        assert (both[0], both[16]) == (-3, 6)


# Lifetimes -----------------------------------------------------------------------------------------------------------
def test_arrays_of_a_run_that_was_interrupted_are_kept_until_it_has_ended(fleet: Fleet) -> None:
    with split(fleet, max_in_flight=1) as session:
        session.run(None, {"x": numbers(4)})
        x, y = session.empty("x", [LARGE]), session.empty("y", [LARGE])
        x[...] = 1
        used, place = process_memory().in_use(), address_of(y)
        binding = bind(session, {"x": x}, y=y)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Runner, "_wait", _interrupt)
            session.run_with_iobinding(binding)
        del x, y, binding
        gc.collect()
        assert process_memory().in_use() == used
        other = session.empty("y", [LARGE])
        assert address_of(other) != place
        session.run(None, {"x": numbers(4)})  # sees the other to its end
        gc.collect()
        assert process_memory().in_use() == used - 4 * LARGE
        assert address_of(session.empty("y", [LARGE])) == place


def _interrupt(*arguments: object) -> bool:
    raise KeyboardInterrupt


def test_a_steady_run_keeps_no_array_alive(fleet: Fleet) -> None:
    with split(fleet, max_in_flight=1) as session:
        x, y = session.empty("x", [LARGE]), session.empty("y", [LARGE])
        used, place = process_memory().in_use(), address_of(y)
        binding = bind(session, {"x": x}, y=y)
        for _ in range(3):
            session.run_with_iobinding(binding)
        del x, y, binding
        gc.collect()
        assert process_memory().in_use() == used - 4 * LARGE
        assert address_of(session.empty("y", [LARGE])) == place


def test_an_array_that_is_let_go_while_a_run_reads_it(fleet: Fleet) -> None:
    with split(fleet) as session:
        futures = []
        for step in range(12):
            x = session.empty("x", [LARGE])
            x[...] = step
            futures.append(session.run_async(["y"], {"x": x}))
            del x
        for step, future in enumerate(futures):
            assert (future.result()[0] == -step).all()


def test_arrays_outlive_their_session_and_its_workers() -> None:
    others = worker_pids()
    with Fleet(["cpu", "cpu:1"]) as own:
        with split(own) as session:
            x, y = session.empty("x", [LARGE]), session.empty("y", [LARGE])
            x[...] = 1
            binding = bind(session, {"x": x}, y=y)
            session.run_with_iobinding(binding)
            for pid in set(worker_pids()) - set(others):
                end(pid)
            x[...], y[...] = 2, 7
            assert copies(session, lambda: session.run_with_iobinding(binding)) == 0  # where the dead ones wrote
            assert (x == 2).all() and (y == -2).all()
            x[...] = 4
            session.restart("cpu:1")
            # A plan that is loaded anew has pools of its own; the memory of this process stays what it is.
            assert copies(session, lambda: session.run_with_iobinding(binding)) == 1
            assert (y == -4).all()
            fresh = session.empty("y", [LARGE])
            assert copies(session, lambda: session.run_with_iobinding(bind(session, {"x": x}, y=fresh))) == 0
            assert (fresh == -4).all()
        kept = [x, y, fresh]
    assert [float(one[-1]) for one in kept] == [4, -4, -4]
    for one in kept:
        one[...] = 9
    assert all((one == 9).all() for one in kept)


def test_a_failed_run_and_the_next(fleet: Fleet) -> None:
    with split(fleet, first=TOUCHY) as session:
        x, y = session.empty("x", [4]), session.empty("y", [4])
        binding = bind(session, {"x": x}, y=y)
        for step in range(3):
            x[...] = [-13, 1, 2, 3]
            with pytest.raises(errors.KernelError, match="unlucky"):
                session.run_with_iobinding(binding)
            x[...] = step
            session.run_with_iobinding(binding)
            assert (y == -step).all()


def test_several_threads_with_bindings_of_their_own(fleet: Fleet) -> None:
    wrong: list[BaseException] = []

    def work(session: InferenceSession, number: int) -> None:
        try:
            size = 16 if number % 2 else LARGE
            x, y, z = (session.empty(name, [size]) for name in ("x", "y", "z"))
            binding = bind(session, {"x": x}, y=y, z=z if number % 3 else None)
            for step in range(25):
                x[...] = number * 100 + step
                session.run_with_iobinding(binding)
                assert (y == -(number * 100 + step)).all()
                assert (binding.get_outputs()[1].numpy() == number * 100 + step + 2).all()
        except BaseException as error:
            wrong.append(error)

    with split(fleet) as session:
        threads = [threading.Thread(target=work, args=(session, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_traced_run(fleet: Fleet, tmp_path: pathlib.Path) -> None:
    with split(fleet) as session:
        x, y = session.empty("x", [LARGE]), session.empty("y", [LARGE])
        binding = bind(session, {"x": x}, y=y, z=None)
        for traced in (False, True, False):
            if traced:
                session.start_trace()
            for step in range(3):
                x[...] = step
                assert copies(session, lambda: session.run_with_iobinding(binding)) == 0
                assert (y == -step).all() and (binding.get_outputs()[1].numpy() == step + 2).all()
            if traced:
                session.stop_trace(tmp_path / "trace.json")


def test_replicas_each_have_a_pool() -> None:
    """What `empty` makes for an output lies in the pool of the first; runs of the others cost a copy."""
    options = SessionOptions(strategy="replicate", max_in_flight=2)
    with InferenceSession(chain("Neg", shape=["N"]), providers=["cpu", "cpu:1"], options=options) as session:
        arrays = [(session.empty("x", [LARGE]), session.empty("y", [LARGE])) for _ in range(4)]

        def work(x: np.ndarray, y: np.ndarray, start: int) -> None:
            binding = bind(session, {"x": x}, y=y)
            for step in range(start, start + 10):
                x[...] = step
                session.run_with_iobinding(binding)
                if not (y == -step).all():
                    wrong.append(step)

        wrong: list[int] = []
        threads = [threading.Thread(target=work, args=(*pair, 100 * i)) for i, pair in enumerate(arrays)]
        before = session.stats()["copies"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert session.stats()["copies"] - before <= 40


# empty ---------------------------------------------------------------------------------------------------------------
def test_what_empty_makes_and_refuses(fleet: Fleet) -> None:
    made = model(
        [node("Concat", "x x", "y", axis=0), node("Identity", "t", "u"), node("SequenceConstruct", "x", "q")],
        [tensor("x", ["N", 3, "N"], TensorProto.BFLOAT16), tensor("t", [1], TensorProto.STRING)],
        [tensor("y", None, TensorProto.BFLOAT16), tensor("u", [1], TensorProto.STRING),
         helper.make_tensor_sequence_value_info("q", TensorProto.BFLOAT16, None)],
    )  # fmt: skip
    with InferenceSession(made, options=SessionOptions(fleet=fleet)) as session:
        x = session.empty("x", (2, 3, 2))
        assert (x.shape, x.dtype.name, x.flags.c_contiguous, x.flags.writeable) == ((2, 3, 2), "bfloat16", True, True)
        assert address_of(x) % 64 == 0
        assert session.empty("y", [9]).dtype == x.dtype
        for name, shape, kind, match in (
            ("nope", [1], errors.InputNotFoundError, "'nope'"),
            ("x", [2, 3], errors.RankMismatchError, "3 dimensions"),
            ("x", [2, 4, 2], errors.ShapeMismatchError, "must be 3"),
            ("x", [2, 3, 5], errors.SymbolConflictError, "'N'"),
            ("x", [-1, 3, -1], errors.InvalidOptionError, "none negative"),
            ("x", 7, errors.InvalidOptionError, "shape"),
            ("t", [1], errors.InvalidOptionError, "string"),
            ("q", [1], errors.InvalidOptionError, "sequence"),
            ("y", [1 << 60], errors.OutOfMemoryError, "'y'"),
        ):
            with pytest.raises(kind, match=match):
                session.empty(name, shape)  # type: ignore[arg-type]
    with pytest.raises(errors.SessionClosedError):
        session.empty("x", (2, 3, 2))


# Random bindings -----------------------------------------------------------------------------------------------------
TARGETS = ["empty", "empty", "plain", "strided", "over", "result", None]
RUN = st.tuples(
    st.sampled_from([5, 5, LARGE]),
    st.sampled_from(["empty", "empty", "plain", "strided", "result", "value"]),
    st.dictionaries(st.sampled_from(["y", "z", "v"]), st.sampled_from(TARGETS), min_size=1),
    st.integers(1, 3),
)


@settings(deadline=None, derandomize=True, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(RUN, min_size=3, max_size=10), st.integers(1, 2))
def test_any_bindings_give_what_plain_runs_give(fleet: Fleet, runs: list[Any], slots: int) -> None:
    kept: dict[int, np.ndarray] = {}  # results, by size

    def memory(kind: str, name: str, size: int) -> np.ndarray:
        if kind == "empty":
            return session.empty(name, [size])
        if kind == "value":
            return OrtValue.ortvalue_from_shape_and_type([size], np.float32).numpy()
        if kind == "result" and size in kept:
            return kept.pop(size)
        wide = np.empty((size, 2), np.float32)
        return wide[:, 1] if kind == "strided" else wide.reshape(-1)[:size]

    with split(fleet, max_in_flight=slots) as session:
        for number, (size, fed, outputs, repeats) in enumerate(runs):
            x = memory(fed, "x", size)
            binding = session.io_binding()
            binding.bind_cpu_input("x", x)
            targets: dict[str, np.ndarray | None] = {}
            for name, kind in outputs.items():
                over = kind == "over" and not any(target is x for target in targets.values())
                targets[name] = x if over else None if kind in (None, "over") else memory(kind, name, size)
                binding._bind(name, None if targets[name] is None else OrtValue(targets[name]))
            for repeat in range(repeats):
                x[...] = numbers(size, number - repeat)
                plain = dict(zip("yzv", session.run(["y", "z", "v"], {"x": x.copy()}), strict=True))
                session.run_with_iobinding(binding)
                for (name, target), made in zip(targets.items(), binding.get_outputs(), strict=True):
                    np.testing.assert_array_equal(made.numpy(), plain[name])
                    assert target is None or made.numpy() is target
            kept[size] = plain["y"]
