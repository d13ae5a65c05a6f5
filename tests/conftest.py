"""Ground rules of every test: nothing is left behind, and a hang ends the run with the name of the test.

Each run has a temporary folder of its own, so what lies in it was made by this run, and a mark in the environment that
every process started by it inherits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator

import pytest

from outrider.providers.cpu.native.build import BuildError, compile_cached
from tests.leaks import MARK, Snapshot, settled_leaks, snapshot
from tests.models import cache_folder
from tests.skips import objection

PATIENCE = 3.0  # seconds until something left behind counts as a leak
HANG_FAST, HANG_SLOW = 120.0, 600.0  # seconds: ten times what such a test may take


class HangGuard:
    """One thread for the whole run. `watch(name, seconds)` arms it, `rest()` disarms it; on time-out it prints the name
    of the test and all stacks and ends the process. Should native code hold the GIL then, faulthandler ends it.
    """

    def __init__(self) -> None:
        # pytest captures descriptor 2 while a test runs; this one still leads to the terminal.
        self.terminal = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
        self.changed = threading.Condition()
        self.name: str | None = None
        self.seconds = 0.0
        self.ended = False
        self.thread = threading.Thread(target=self._run, name="hang-guard", daemon=True)
        self.thread.start()

    def watch(self, name: str, seconds: float) -> None:
        with self.changed:
            self.name, self.seconds = name, seconds
            self.changed.notify()
        faulthandler.dump_traceback_later(seconds + 30, exit=True, file=self.terminal)

    def rest(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        with self.changed:
            self.name = None
            self.changed.notify()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify()
        self.thread.join()
        self.terminal.close()

    def _run(self) -> None:
        with self.changed:
            while not self.ended:
                name, seconds = self.name, self.seconds
                if name is None:
                    self.changed.wait()
                elif not self.changed.wait_for(lambda name=name: self.ended or self.name != name, seconds):
                    self.terminal.write(f"\n\n{name} hangs: no end after {seconds:.0f} s. Stacks of all threads:\n")
                    self.terminal.flush()
                    faulthandler.dump_traceback(self.terminal)
                    os._exit(1)


GUARD = pytest.StashKey[HangGuard]()
SKIPPED: dict[str, str] = {}  # test -> why it may not be skipped
FOLDER = pytest.StashKey[str]()
FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    # pytest's own tmp_path folders stay where they are kept for a look after a failure.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    config.stash[FOLDER] = tempfile.mkdtemp(prefix="ot-")  # short: socket paths end at 107 bytes
    os.environ["TMPDIR"] = tempfile.tempdir = config.stash[FOLDER]
    os.environ.pop("OUTRIDER_PROVIDERS", None)  # providers=None means cpu
    os.environ["OUTRIDER_CACHE"] = os.path.join(config.stash[FOLDER], "cache")  # no verdict of another run counts
    os.mkdir(os.environ["OUTRIDER_CACHE"])
    for name in ("kernels", "suite"):  # except what is named after all that it was made from
        kept = cache_folder() / name
        kept.mkdir(exist_ok=True)
        os.symlink(kept, os.path.join(os.environ["OUTRIDER_CACHE"], name))
    os.environ[MARK] = f"{os.getpid()}-{os.path.basename(config.stash[FOLDER])}"
    config.stash[GUARD] = HangGuard()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[GUARD].end()
    shutil.rmtree(config.stash[FOLDER], ignore_errors=True)
    tempfile.tempdir = None
    for name in ("TMPDIR", "OUTRIDER_CACHE", MARK):
        os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    """No test waits for a compiler. What is there before the first test is nobody's leak: it need not be walked."""
    with contextlib.suppress(BuildError):
        compile_cached()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
    guard = item.config.stash[GUARD]
    guard.watch(item.nodeid, HANG_FAST if item.get_closest_marker("fast") else HANG_SLOW)
    try:
        return (yield)
    finally:
        guard.rest()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _look_at_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _look_at_skip(report)


def _look_at_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        said = objection(reason)
        if said:
            SKIPPED[report.nodeid] = f"{reason}: {said}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if SKIPPED and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for test, why in SKIPPED.items():
        terminalreporter.write_line(f"SKIPPED WITHOUT REASON {test}: {why}", red=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[object]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_module() -> Iterator[None]:
    """The same for what a module's tests share: gone when the module is done."""
    before = snapshot()
    yield
    _check(before, "the module and its fixtures", orphans=True)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, nothing_left_by_module: None) -> Iterator[None]:
    """No process, segment, socket folder, descriptor, mapping or thread more than before the test."""
    before = snapshot(orphans=False)  # those are looked for when the module is done
    yield
    # The traceback of a failed test keeps its local variables alive, sessions and results among them.
    if not request.node.stash.get(FAILED, False):
        _check(before, "the test", orphans=False)


def _check(before: Snapshot, who: str, orphans: bool) -> None:
    found = settled_leaks(before, PATIENCE, orphans)
    if found:
        pytest.fail(f"{who} left behind:\n  " + "\n  ".join(found), pytrace=False)
