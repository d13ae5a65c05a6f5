"""What crossing costs is measured: sane, and once."""

import threading

import pytest

from outrider.scheduler.crossings import HANDLING, measured_crossing

pytestmark = pytest.mark.fast


def test_crossing_is_measured_once_and_leaves_no_thread():
    before = threading.active_count()
    found = measured_crossing()
    assert found.hop > HANDLING
    assert 0 < found.byte < 1e-6
    assert measured_crossing() is found
    assert threading.active_count() == before
