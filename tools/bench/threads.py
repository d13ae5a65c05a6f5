"""Many runs in flight: calls from several threads, counted per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outrider.tools.bench.measure import Sample


def throughput(call: Callable[[], object], threads: int) -> Sample:
    """A sample of one number: runs per second of so many calls, dealt to `threads` threads that start together.

    Raises what the first call that failed raised.
    """

    def sample(calls: int) -> list[float]:
        each = -(-calls // threads)
        ready = threading.Barrier(threads + 1)
        raised: list[BaseException] = []

        def work() -> None:
            try:
                ready.wait()
                for _ in range(each):
                    call()
            except BaseException as error:
                raised.append(error)

        crew = [threading.Thread(target=work, name=f"bench-{number}") for number in range(threads)]
        for one in crew:
            one.start()
        ready.wait()
        start = time.perf_counter()
        for one in crew:
            one.join()
        taken = time.perf_counter() - start
        if raised:
            raise raised[0]
        return [each * threads / taken]

    return sample
