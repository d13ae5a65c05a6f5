"""The unbound stretch as a block of its own, bound in the run to the shapes that its inputs then have.

Once the ops have run whose results have no size before the run (NonZero, a Range up to what was computed), the others
are ops like any: what depends on them is a block that is bound like the body of a control-flow node, with the late
values copied in. A next run with the same shapes finds it bound; one whose shapes keep changing soon runs it op by op,
as control flow does. Where the block has such ops again, what depends on those is a block inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.providers.cpu.binding import Binding, LateAlias, LateOp
from outrider.providers.cpu.blocks import Block, Code, Op
from outrider.providers.cpu.building import Builder
from outrider.providers.cpu.control import Body, body_in
from outrider.providers.cpu.items import LATE_ITEM
from outrider.providers.cpu.records import STRETCH, Record

LEAST = 8  # ops from which on a block of their own pays
DEEPEST = 24  # blocks inside one another


class Stretch:
    """The ops of `block` as one late op. `before`: as it was in an earlier binding."""

    def __init__(self, block: Block, parent: Builder, before: Stretch | None) -> None:
        self.block = block
        self.ops = block.ops
        self.reads = block.free
        self.body: Body = body_in(block, parent, None if before is None else before.body)

    def __call__(self, env: dict[int, Any], binding: Binding) -> None:
        env.update(zip(self.block.results, self.body.call((), env), strict=True))

    def bindings(self) -> Sequence[Binding]:
        last = self.body.lineage.last
        return () if last is None else (last,)


def gathered(parent: Builder, records: Sequence[Record], before: LateOp | None) -> list[Record]:
    """The records with those that depend on late results as one; the same ones where that does not pay.

    `before`: the stretch of an earlier binding, if it had one.
    """
    late = [record for record in records if record.late is not None]
    made: set[int] = set()
    inner: list[Record] = []
    for record in late:
        if isinstance(record.late, LateAlias):
            return [*records]
        if not made.isdisjoint(record.reads):
            inner.append(record)
        made.update(record.makes)
    if len(inner) < LEAST or parent.block.depth >= DEEPEST:
        return [*records]
    ops = [record.op for record in inner if record.op is not None]
    earlier = before if isinstance(before, Stretch) and before.ops == ops else None
    block = _block(parent.code, parent.block, ops) if earlier is None else earlier.block
    own = set(ops)
    return [
        *[record for record in records if record.late is None or record.op not in own],
        _recorded(Stretch(block, parent, earlier)),
    ]


def again(parent: Builder, record: Record) -> Record:
    """The record of the same stretch in another binding."""
    assert isinstance(record.late, Stretch)
    return _recorded(Stretch(record.late.block, parent, record.late))


def _recorded(stretch: Stretch) -> Record:
    makes = dict.fromkeys(stretch.block.results, LATE_ITEM)
    return Record(STRETCH, None, stretch.reads, makes, late=stretch)


def _block(code: Code, around: Block, ops: list[Op]) -> Block:
    made = {number for op in ops for number in op.outputs}
    results = tuple(dict.fromkeys(number for number in around.results if number in made))
    block = Block(f"{around.name} from {ops[0].origin.name} on", (), results, depth=around.depth + 1)
    block.ops = ops
    block.note_uses(code.is_constant)
    return block
