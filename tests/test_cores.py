"""How workers that compute at once share the cores."""

import pytest

from outrider.scheduler.cores import thread_share, usable_cores

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("cores", "wanted", "share"),
    [
        (8, [None], 8), (8, [None, None], 4), (8, [None] * 3, 2), (2, [None] * 3, 1), (8, [2, None, None], 3),
        (4, [4, None], 1), (2, [5, None], 1), (8, [4, 4], 1), (1, [], 1),
    ],
)  # fmt: skip
def test_open_workers_share_what_the_others_leave(cores, wanted, share):
    assert thread_share(cores, wanted) == share


def test_at_least_one_core():
    assert usable_cores() >= 1
