"""Nothing that a worker says is believed unchecked: what it may not say is an error that blames its provider, whoever
came across it, and the session goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from outrider.providers.wire import messages
from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions, errors, replica
from tests import rogue_providers as rogue
from tests.builders import chain, model, node, tensor
from tests.environments import numpy_only

SPEC = f"{rogue.__file__}:Rogue"
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds
X = np.array([[-2, -1, 0.5, 3], [1, 2, 3, -4]], np.float32)
BAD = np.array([[-99, -1, 0.5, 3], [1, 2, 3, -4], [1, 2, 3, -4]], np.float32)  # another shape, another layout

MESSAGES = [
    "garbage", "too large", "a list as a key", "keys of two kinds", "an unknown message", "a surplus field",
    "our own message", "hello again", "start failed", "an answer to nothing", "claims again", "failed: of another",
    "failed: partition -1", "failed: of a run to come", "failed: of a slot that is none",
]  # fmt: skip
HARMLESS = ["unloaded", "unloaded ten thousand times", "failed: of another session", "done with a run to come"]
SPOKEN = {
    "error: another is blamed": "it was not me",
    "error: the session was closed": "SessionClosedError: it was not me",
    "error: a death": "WorkerDiedError: it was not me",
}
RECORDS = [name for name in rogue.RUNS if name.startswith(("record", "number"))]
ENCODED = [name for name in rogue.RUNS if name.startswith("encoded")]


class Stage:
    """A fleet of the rogue and an honest worker, and sessions on it. Each case ends the rogue's process, and a test has
    many: starting the fleet anew for each would take longer than all of them.
    """

    def __init__(self, folder: Path, python: Path | None) -> None:
        self.order = folder / "order"
        self.order.write_text("")
        options = {"order": str(self.order), "operators": ["Relu", "SequenceConstruct"]}
        self.fleet = Fleet([ProviderSpec(SPEC, options=options, python=python), "cpu"])

    def open(self, source: onnx.ModelProto) -> InferenceSession:
        return InferenceSession(source, options=SessionOptions(fleet=self.fleet, replay=False, fallback=False))

    def deaths(self, name: str = SPEC) -> int:
        return int(self.fleet.health()[name]["deaths"])

    def until_it_died(self, times: int, how: str = "") -> None:
        limit = time.monotonic() + ENOUGH
        while self.deaths() < times:
            assert time.monotonic() < limit, how
            time.sleep(0.01)

    def settle(self, session: InferenceSession) -> None:
        """The rogue behaves again: runs are right after those few that meet the end of its last incarnation."""
        self.order.write_text("")
        for _ in range(5):
            try:
                (y,) = session.run(None, {"x": X})
            except errors.WorkerDiedError as error:
                assert error.provider == SPEC
            else:
                np.testing.assert_array_equal(np.abs(y), relu(X))
                return
        pytest.fail("the session does not recover")

    def blamed(self, session: InferenceSession, how: str, words: str) -> None:
        """In a run in which it does this, the rogue is blamed, and the session recovers."""
        try:
            self.settle(session)
            self.order.write_text(how)
            with pytest.raises(errors.ProviderContractError, match=words) as caught:
                session.run(None, {"x": BAD})
            assert caught.value.provider == SPEC
            self.order.write_text("")
            np.testing.assert_array_equal(np.abs(session.run(None, {"x": X})[0]), relu(X))
        except BaseException as error:
            error.add_note(how)
            raise

    def heard(self, session: InferenceSession, how: str) -> None:
        """Have the rogue say something in a run, whose answer is right all the same if it comes before its end."""
        self.settle(session)
        self.order.write_text(how)
        try:
            (y,) = session.run(None, {"x": BAD})
        except errors.WorkerDiedError as error:
            assert error.provider == SPEC, how
        else:
            np.testing.assert_array_equal(np.abs(y), relu(BAD))


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, numpy_only() if getattr(request, "param", False) else None)
    with made.fleet:
        yield made


# What is said on the control plane is said over ZeroMQ, and over the socket pair of an environment without it.
over_both = pytest.mark.parametrize("stage", [False, True], indirect=True, ids=["zeromq", "pair"])


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def test_a_result_that_cannot_be_read_blames_its_provider(stage: Stage) -> None:
    with stage.open(chain("Relu")) as session:
        for how in RECORDS:
            stage.blamed(session, how, "'y'")


def test_a_value_that_cannot_be_read_blames_its_writer_not_its_reader(stage: Stage) -> None:
    with stage.open(chain("Relu", "Neg")) as session:
        for how in ("record: pointers", "record: nothing", "record: place in the pool", "number 17"):
            stage.blamed(session, how, "'v1'")
    assert stage.deaths("cpu") == 0


@pytest.mark.parametrize("read_by", ["caller", "worker"])
def test_a_sequence_that_is_none_blames_its_writer(stage: Stage, read_by: str) -> None:
    made = tensor("s", None)
    made.type.CopyFrom(onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(1, None)))
    nodes = [node("SequenceConstruct", "x", "s", "n0")]
    if read_by == "worker":
        nodes += [node("SequenceInsert", "s x", "t", "n1"), node("Identity", "t", "y", "n2")]
        made.name = "y"
    with stage.open(model(nodes, [tensor("x", ["N", 4])], [made])) as session:
        for how in ENCODED:
            stage.order.write_text(how)
            with pytest.raises(errors.ProviderContractError, match="'s'") as caught:
                session.run(None, {"x": BAD})
            assert caught.value.provider == SPEC, how
            stage.order.write_text("")
            session.run(None, {"x": X})
    assert stage.deaths("cpu") == 0


def test_a_value_of_another_run_is_not_taken_for_this_ones(stage: Stage) -> None:
    with stage.open(chain("Relu")) as session:
        for how in ("value of the last run", "value of a run to come"):
            stage.blamed(session, how, "of run")


def test_a_run_that_nobody_began_ends_who_tells_of_it(stage: Stage) -> None:
    for operators, how in [(["Relu"], "all of a run to come"), (["Relu", "Neg"], "value of a run to come")]:
        with stage.open(chain(*operators)) as session:
            for _ in range(3):
                session.run(None, {"x": np.ones_like(BAD)})  # the caller's side is in its steady state then
            stage.order.write_text(how)
            with pytest.raises(errors.ProviderContractError, match="the last one begun") as caught:
                session.run(None, {"x": BAD})
            assert caught.value.provider == SPEC
            stage.settle(session)
    assert stage.deaths("cpu") == 0


def test_a_void_value_that_nobody_explains_blames_who_made_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "FAILURE_SECONDS", 0.5)
    for operators, how in [(["Relu"], "void without a story"), (["Relu", "Neg"], "number 0")]:
        with stage.open(chain(*operators)) as session:
            stage.blamed(session, how, "nobody said why")


def test_the_reason_of_a_void_value_may_die_with_its_worker(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "FAILURE_SECONDS", 10 * ENOUGH)  # not waited for
    for operators in (["Relu"], ["Relu", "Neg"]):
        with stage.open(chain(*operators)) as session:
            stage.settle(session)
            stage.order.write_text("void and death")
            with pytest.raises(errors.WorkerDiedError) as caught:
                session.run(None, {"x": BAD})
            assert caught.value.provider == SPEC
            stage.settle(session)


@over_both
def test_a_message_out_of_place_ends_who_sends_it(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_BYTES", 1 << 20)
    with stage.open(chain("Relu")) as session:
        for how in MESSAGES if stage.fleet.workers[0].spec.python is None else MESSAGES[:2] + MESSAGES[5::4]:
            stage.settle(session)
            caplog.clear()
            before = stage.deaths()
            stage.heard(session, how)
            stage.until_it_died(before + 1, how)
            limit = time.monotonic() + ENOUGH
            while f"worker {SPEC} broke the protocol" not in caplog.text:  # logged by a thread of its own
                assert time.monotonic() < limit, how
                time.sleep(0.001)
        stage.settle(session)


@over_both
def test_what_is_late_or_read_by_nobody_does_no_harm(stage: Stage) -> None:
    with stage.open(chain("Relu", "Neg")) as session:
        for how in HARMLESS:
            stage.heard(session, how)
            stage.settle(session)
        assert stage.deaths() == 0


@over_both
def test_a_worker_that_hears_nothing_any_more_still_runs_and_is_ended_with_its_fleet(stage: Stage) -> None:
    with stage.open(chain("Relu")) as session:
        stage.heard(session, "closed control")
        stage.settle(session)


def test_a_worker_speaks_for_itself_only(stage: Stage) -> None:
    with stage.open(chain("Relu")) as session:
        for how, words in SPOKEN.items():
            stage.settle(session)
            stage.order.write_text(how)
            with pytest.raises(errors.KernelError, match=words) as caught:
                session.run(None, {"x": BAD})
            assert caught.value.provider == SPEC, how


def test_a_claim_is_taken_back_on_nodes_of_its_own_partition(stage: Stage) -> None:
    with InferenceSession(chain("Relu", "Neg"), options=SessionOptions(fleet=stage.fleet)) as session:
        stage.order.write_text("error: a claim on other nodes")
        np.testing.assert_array_equal(session.run(None, {"x": BAD})[0], -relu(BAD))
        assert [one.provider for one in session.placement().nodes] == ["cpu", "cpu"]


def test_a_reader_that_blames_for_nothing_is_blamed(stage: Stage) -> None:
    with stage.open(chain("Relu")) as session:
        for how in ("error: an edge of nobody", "error: an edge in words", "error: an edge that is right"):
            stage.blamed(session, how, SPEC)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("claim: overlap", errors.ClaimError, "two claims on node 'n0'"),
        ("claim: a hundred thousand", errors.ClaimError, "two claims on node 'n0'"),
        ("claim: node in a list", errors.ClaimError, "which was not shown"),
        ("claim: ends apart", errors.ClaimError, "not convex: 'n1'"),
        ("claim: error without a type", errors.ClaimBrokenError, "claim.. raised None: 3"),
        ("claim: error of another", errors.ProviderContractError, "it was him"),
        ("claim: error of ours", errors.ClaimBrokenError, "SessionClosedError: closed"),
        ("claim: another round", errors.WorkerDiedError, "SIGKILL"),
        ("claim: another session", errors.WorkerDiedError, "SIGKILL"),
        ("load: another partition", errors.ProviderContractError, "unit that it was not given"),
        ("load: partition -2", errors.ProviderContractError, "unit that it was not given"),
        ("load: unit 9", errors.ProviderContractError, "unit that it was not given"),
        ("load: partition in words", errors.ProviderContractError, "unit that it was not given"),
        ("load: nothing said", errors.ProviderContractError, "unit that it was not given"),
    ],
)
def test_a_false_answer_before_the_first_run(
    stage: Stage, how: str, kind: type[errors.OutriderError], words: str
) -> None:
    stage.order.write_text(how)
    with pytest.raises(kind, match=words) as caught:
        stage.open(chain("Relu", "Neg", "Relu"))
    assert caught.value.provider == SPEC
    stage.order.write_text("")
    if how.startswith("load"):
        stage.until_it_died(1)
    with stage.open(chain("Relu", "Neg")) as session:
        stage.settle(session)


def test_what_names_no_node_in_a_refusal_is_passed_over(stage: Stage) -> None:
    stage.order.write_text("refused: nodes in lists")
    with pytest.raises(errors.ClaimBrokenError, match="cannot compile it: no") as caught:
        stage.open(chain("Relu"))
    assert (caught.value.provider, caught.value.nodes) == (SPEC, ["n0"])
    stage.order.write_text("")
    with stage.open(chain("Relu", "Neg")) as session:
        stage.settle(session)
    assert stage.deaths() == 0


@pytest.mark.parametrize("how", list(rogue.START))
def test_a_false_greeting_is_a_provider_that_did_not_start(tmp_path: Path, how: str) -> None:
    order = tmp_path / "order"
    order.write_text(how)
    with pytest.raises(errors.ProviderUnavailableError, match="it broke the protocol|its probe .* failed") as caught:
        Fleet([(SPEC, {"order": str(order)}), "cpu"])
    assert caught.value.provider == SPEC


def test_a_worker_that_takes_no_descriptors_is_ended(stage: Stage) -> None:
    with stage.open(chain("Relu")) as session:
        stage.heard(session, "closed descriptors")
        stage.settle(session)
        with pytest.raises(errors.WorkerDiedError) as caught:
            stage.open(chain("Relu", "Neg"))
        assert caught.value.provider == SPEC
        stage.until_it_died(1)
        stage.settle(session)
    with stage.open(chain("Relu", "Neg")) as session:
        stage.settle(session)
    assert stage.deaths() == 1


def test_counters_that_are_none_are_told_of_and_left_out(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with stage.open(chain("Relu", "Neg")) as session:
        for how in rogue.COUNTERS:
            stage.heard(session, how)
            caplog.clear()
            assert session.stats()["providers"][SPEC] == {}
            assert f"worker {SPEC} tells no counters: counters are malformed" in caplog.text, how
        stage.settle(session)
        assert session.stats()["providers"][SPEC]["bound"] > 0
