"""ONNX's backend suite through one `cpu` worker of one fleet, against the checked list of known failures."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.scheduler.errors import OutriderError, ProviderUnavailableError, WorkerDiedError
from outrider.tools.conformance.compare import difference
from outrider.tools.conformance.suite import Case, Suite, load_suite

CHUNKS = 20
LEAST_PASSES = 1900
KNOWN = tomllib.loads(Path(__file__).with_name("known_failures.toml").read_text())


@dataclass
class Backend:
    """The fleet that all cases share, and what came of them. A case that kills the worker costs the next a start."""

    suite: Suite
    fleet: outrider.Fleet | None = None
    outcomes: dict[str, str | None] = field(default_factory=dict)
    references: set[str] = field(default_factory=set)

    def run(self, case: Case) -> str | None:
        """None if the case passes, else the reason why not."""
        if self.fleet is None:
            self.fleet = outrider.Fleet([outrider.ProviderSpec("cpu", threads=1)])
        try:
            return self._run(case, self.fleet)
        except (WorkerDiedError, ProviderUnavailableError) as error:
            self.close()
            return f"{type(error).__name__}: {error}"
        except OutriderError as error:
            return f"{type(error).__name__}: {error}"

    def _run(self, case: Case, fleet: outrider.Fleet) -> str | None:
        options = outrider.SessionOptions(fleet=fleet)
        with outrider.InferenceSession(case.model, options=options) as session:
            if any(node["reference"] for node in session.placement().to_dict()["nodes"]):
                self.references.add(case.name)
            for inputs, expected in case.data:
                got = session.run(None, inputs)
                if case.name in KNOWN["undecided"]:
                    expected, got = _forms(expected), _forms(got)
                reason = difference(expected, got, case.rtol, case.atol)
                if reason is not None:
                    return reason
        return None if case.data else "the case has no data"

    def close(self) -> None:
        if self.fleet is not None:
            self.fleet.close()
            self.fleet = None


def _forms(values: list[Any]) -> list[Any]:
    """Zeros of the same shapes and dtypes."""
    return [np.zeros_like(value) for value in values]


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    made = Backend(load_suite())
    # The process that all cases share is there before the first test, so it does not count as left behind by it.
    made.fleet = outrider.Fleet([outrider.ProviderSpec("cpu", threads=1)])
    yield made
    made.close()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_cases(backend: Backend, chunk: int) -> None:
    wrong = []
    for name in backend.suite.names()[chunk::CHUNKS]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the suite divides by zero on purpose
            reason = backend.outcomes[name] = backend.run(backend.suite.read(name))
        if reason is None and name in KNOWN["failures"]:
            wrong.append(f"{name} passes; take it off known_failures.toml")
        if reason is not None and name not in KNOWN["failures"]:
            wrong.append(f"{name}: {reason}")
    assert not wrong, f"{len(wrong)} surprises:\n" + "\n".join(wrong)


def test_totals(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    names = backend.suite.names()
    if len(backend.outcomes) < len(names):
        pytest.skip("only some of the chunks ran")
    passed = [name for name, reason in backend.outcomes.items() if reason is None and name not in KNOWN["undecided"]]
    with capsys.disabled():
        print(
            f"\nONNX backend suite: {len(passed)} of {len(names)} cases pass;"
            f" {len(backend.references)} touched onnx.reference."
        )
    assert len(passed) >= LEAST_PASSES
    listed = {*KNOWN["failures"], *KNOWN["undecided"]}
    assert not listed - set(names), "known_failures.toml names cases that do not exist"
