"""What memory a program takes: planned against what its values would take each by itself, and its weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outrider.providers.cpu.items import Root
from outrider.providers.cpu.records import Record
from outrider.shm.errors import OutOfMemoryError

if TYPE_CHECKING:
    from outrider.providers.cpu.binding import Binding
    from outrider.providers.cpu.blocks import Code

SHOWN = 5  # values that an error names


class Memory(NamedTuple):
    """Bytes. Of the latest binding, bodies included: `planned`, its scratch memory with room to grow; `peak`, the most
    that is in use at once; `naive`, all its values and scratch arrays, if each had its own. Of the weights:
    `originals`, what was packed; `packed`, what was made of it.
    """

    planned: int = 0
    peak: int = 0
    naive: int = 0
    originals: int = 0
    packed: int = 0


def program_memory(code: Code, binding: Binding | None) -> Memory:
    """The memory of a program whose latest binding this is."""
    # Several kernels may pack one constant, and two may share what is made of it.
    made = [(op.inputs[i], one) for (op, i), variants in code.packed.items() for one in variants.values()]
    originals = sum({number: one.source for number, one in made}.values())
    packed = sum({id(one): one.nbytes for _, one in made}.values())
    if binding is None:
        return Memory(0, 0, 0, originals, packed)
    naive = sum(nbytes for one in binding.all() for _, nbytes in values(code, one.records))
    return Memory(*_extent(binding), naive, originals, packed)


def _extent(binding: Binding) -> tuple[int, int]:
    """Scratch memory and the most in use; that of a body lies behind that of the block around it."""
    region = binding.region
    inner = [_extent(one) for one in itertools.islice(binding.all(), 1, None)]
    behind = [max(sizes) for sizes in zip(*inner, strict=True)] or [0, 0]
    return region.high - region.base + behind[0], region.peak + behind[1]


def values(code: Code, records: Iterable[Record]) -> list[tuple[str, int]]:
    """(name, bytes) of each value that the records make in scratch memory, and of each scratch array."""
    found = []
    for record in records:
        named: set[Root] = set()
        reused = set(record.reused)
        own = {taken.root for taken in record.taken}
        for number, item in record.makes.items():
            if item.root is not None and (item.root in own or item.root in reused):
                named.add(item.root)
                assert isinstance(item.value, np.ndarray)
                found.append((code.names[number], item.value.nbytes))
        about = "inputs" if record.op is None else f"scratch memory of {record.op.origin.name}"
        found += [(about, taken.asked) for taken in record.taken if taken.root not in named]
    return found


def out_of_memory(error: OutOfMemoryError, planned: int, found: Sequence[tuple[str, int]]) -> OutOfMemoryError:
    """The error of a program that has no room for its `planned` bytes, with its largest values."""
    largest = sorted(dict(found).items(), key=lambda pair: -pair[1])[:SHOWN]
    listed = ", ".join(f"{name} {nbytes}" for name, nbytes in largest)
    return OutOfMemoryError(
        f"a program needs {planned} bytes of scratch memory at once, {error.asked} more than it has, where "
        f"{error.available} are available; its largest values, in bytes: {listed}; use smaller inputs, or give the "
        "worker more memory (memory_limit, if it has one)",
        value=error.value, asked=error.asked, available=error.available, largest=[list(pair) for pair in largest],
    )  # fmt: skip
