"""The compiled kernels: a small C library without Python's ABI, and how it is built, loaded and called.

- `source/`: the C files. `outrider.h` says what a kernel is, `pool.c` holds the one thread pool of the process.
- `build.py`: from sources to a library file, in a cache keyed by sources and flags.
- `library.py`: the loaded library. `calls.py`: a prepared call, and several in a row as one.

Every kernel family works without it, in NumPy; `Bind.compiled(family)` gives the library or None.
"""

from outrider.providers.cpu.native.calls import Call, merged
from outrider.providers.cpu.native.library import FAMILIES, Library, NativeError, load

__all__ = ["FAMILIES", "Call", "Library", "NativeError", "load", "merged"]
