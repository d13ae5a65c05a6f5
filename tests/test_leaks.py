"""The ground rules themselves: each kind of leak is seen and named; a hang ends the run and names the test."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from tests.leaks import leaks, snapshot

pytestmark = pytest.mark.fast


def test_nothing_leaks_from_nothing() -> None:
    assert leaks(snapshot(), snapshot()) == []


def test_descriptor_is_named() -> None:
    before = snapshot()
    descriptor = os.eventfd(0)
    try:
        assert leaks(before, snapshot()) == ["1 descriptors more: anon_inode:[eventfd]"]
    finally:
        os.close(descriptor)


def test_mapping_is_named_after_its_descriptor_is_closed() -> None:
    before = snapshot()
    descriptor = os.memfd_create("leaked")
    os.ftruncate(descriptor, 4096)
    mapping = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
    found = leaks(before, snapshot())
    mapping.close()
    assert [line for line in found if "mappings" in line] == ["1 mappings more: /memfd:leaked (deleted)"]


def test_child_and_orphan_are_named() -> None:
    before = snapshot()
    # The child starts a grandchild and ends: the grandchild is nobody's child, but it carries this run's mark.
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    orphan = int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)
    child = subprocess.Popen(["sleep", "61"])
    try:
        found = leaks(before, snapshot())
        assert any(line.startswith(f"process {child.pid}: sleep 61") for line in found)
        assert [line for line in leaks(before, snapshot(orphans=False)) if "sleep" in line] == [
            line for line in found if "sleep 61" in line
        ]
        assert any(line.startswith(f"process {orphan}: sleep 60") for line in found)
    finally:
        child.kill()
        child.wait()
        os.kill(orphan, 9)


def test_socket_folder_is_named() -> None:
    before = snapshot()
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        assert leaks(before, snapshot()) == [folder]


def test_thread_is_named() -> None:
    before = snapshot()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    try:
        assert leaks(before, snapshot()) == ["1 threads more: forgotten"]
    finally:
        end.set()
        thread.join()


def test_a_hang_ends_the_run_and_names_the_test(tmp_path: object) -> None:
    script = (
        "import threading, conftest\n"
        "guard = conftest.HangGuard()\n"
        "guard.watch('test_x.py::test_y[3]', 0.2)\n"
        "threading.Event().wait()\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{os.path.dirname(__file__)}:{os.path.dirname(os.path.dirname(__file__))}",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60, env=environment
    )
    assert done.returncode == 1
    assert "test_x.py::test_y[3] hangs" in done.stderr
    assert 'File "<string>", line 4' in done.stderr
