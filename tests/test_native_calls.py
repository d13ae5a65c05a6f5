"""The compiled library as such: prepared calls, rows of them, and the pool under many jobs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from outrider.providers.cpu.native import Call, Library, NativeError, merged
from outrider.providers.cpu.native.build import SOURCE, BuildError, compile_to, target, target_flags

# Adds task + 1 into place[task], so that a task done twice, or never, shows.
_COUNTING = """
#include "outrider.h"
struct or_counting { int64_t *place; int64_t pause; double scale; };
KERNEL(or_counting)
{
    ARGS(or_counting);
    for (volatile int64_t i = 0; i < a->pause; i++)
        ;
    a->place[task] += (int64_t)(a->scale * (double)(task + 1));
}
"""


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """A library with the pool and one kernel, on four threads."""
    folder = tmp_path_factory.mktemp("counting")
    (folder / "counting.c").write_text(_COUNTING)
    for name in ("outrider.h", "pool.c", "features.c"):
        (folder / name).write_bytes((SOURCE / name).read_bytes())
    compile_to(folder / "kernels.so", ["cc"], target_flags(target()), folder)
    library = Library(folder / "kernels.so", threads=4)
    yield library
    library.stop()


def test_every_task_is_done_once(counting: Library) -> None:
    for tasks in (1, 2, 3, 4, 7, 64, 1000, 65535):
        place = np.zeros(tasks, np.int64)
        call = counting.call("or_counting", tasks, place, 10, 1.0)
        for _ in range(3):
            call()
        np.testing.assert_array_equal(place, 3 * np.arange(1, tasks + 1))


def test_many_small_jobs_in_a_row_wait_for_one_another(counting: Library) -> None:
    places = [np.zeros(1 + at % 9, np.int64) for at in range(400)]
    steps = [counting.call("or_counting", len(place), place, at % 50, 2.0) for at, place in enumerate(places)]
    ((row, first),) = merged(steps)
    assert first == 0
    for _ in range(50):
        row()
    for place in places:
        np.testing.assert_array_equal(place, 100 * np.arange(1, len(place) + 1))


def test_calls_in_a_row_are_one_and_know_their_place(counting: Library) -> None:
    seen: list[int] = []
    place = np.zeros(2, np.int64)

    def call() -> Call:
        return counting.call("or_counting", 2, place, 0, 1.0)

    def note() -> None:
        seen.append(int(place[0]))

    line = merged([call(), call(), note, call(), note, call(), call(), call()], first=10)
    assert [at for _, at in line] == [10, 12, 13, 14, 15]
    for step, _ in line:
        step()
    assert seen == [2, 3]
    assert place.tolist() == [6, 12]


def test_arguments_are_counted_and_tasks_bounded(counting: Library) -> None:
    place = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="or_counting takes 3 arguments and got 2"):
        counting.call("or_counting", 1, place, 0)
    with pytest.raises(ValueError, match="0 tasks"):
        counting.call("or_counting", 0, place, 0, 1.0)
    with pytest.raises(ValueError, match="65536 tasks"):
        counting.call("or_counting", 65536, place, 0, 1.0)


def test_a_stopped_pool_leaves_the_work_to_the_caller(counting: Library) -> None:
    counting.stop()
    place = np.zeros(9, np.int64)
    counting.call("or_counting", 9, place, 0, 1.0)()
    assert place.tolist() == list(range(1, 10))


def test_what_cannot_be_built_or_loaded_says_why(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken.c").write_text("int or_broken(void) { return nothing; }")
    with pytest.raises(BuildError, match="nothing"):
        compile_to(folder / "kernels.so", ["cc"], (), folder)
    assert [file.name for file in folder.iterdir()] == ["broken.c"]
    (folder / "kernels.so").write_bytes(b"no library")
    with pytest.raises(NativeError, match="cannot be loaded"):
        Library(folder / "kernels.so")
