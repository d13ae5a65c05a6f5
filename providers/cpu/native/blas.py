"""NumPy's BLAS on one thread: two pools in one process that both look for work mostly cost more than they bring."""

from __future__ import annotations

import ctypes
from pathlib import Path

_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_",
            "openblas_set_num_threads")  # fmt: skip


def single_thread() -> bool:
    """Set every OpenBLAS of this process to one thread. False where none was found: its environment rules then."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return False
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line}
    found = False
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for name in _SETTERS:
            setter = getattr(library, name, None)
            if setter is not None:
                setter(1)
                found = True
                break
    return found
