"""What binding one op gave. A binding is a list of records; a later one of the same block takes over what still holds.

Records are never changed, so any number of bindings may share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.providers.cpu.blocks import Block, Op
from outrider.providers.cpu.items import Item, Root

if TYPE_CHECKING:
    from outrider.providers.cpu.binding import LateOp

STAGED = "staged"  # values that are copied into the block before it runs; no op
FOLDED = "folded"  # executed while binding: every input is known
BOUND = "bound"  # steps
UNBOUND = "unbound"  # bound in each run, or control flow
CHOSEN = "chosen"  # an If whose condition is known; the ops of its branch follow
STRETCH = "stretch"  # many unbound ops as one block (`stretch.py`); no op
ALIAS = "alias"  # an output of such an If


class Misfit(Exception):
    """A binding does not fit the memory plan, or the structure, of the one it should be made from."""


class Taken(NamedTuple):
    """One request for memory: where, bytes asked for, and the largest change of that from one binding to the next."""

    root: Root
    asked: int
    change: int


class Record(NamedTuple):
    """One op, bound.

    `reads`: numbers of values; `makes`: the states of its outputs; `steps`: its calls in a run, or `late`: how it runs
    without them; `taken`: its requests for memory, in order; `reused`: per call of `Bind.reuse` the memory written
    over, or None; `branch`: what a known condition chose.
    """

    kind: str
    op: Op | None
    reads: tuple[int, ...]
    makes: Mapping[int, Item]
    steps: tuple[Callable[[], Any], ...] = ()
    late: LateOp | None = None
    taken: tuple[Taken, ...] = ()
    reused: tuple[Root | None, ...] = ()
    branch: Block | None = None
