"""Fusion: at optimization level `all`, one op is put for several, once, before any shape is bound.

`draft.py` is the block while that happens; each pass is one module with its patterns drawn in its docstring, and says
whether results stay bit-equal. Bodies are fused before what they stand in. A unit's ops are all there is, so nothing is
fused across a cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from outrider.providers.cpu.blocks import Block, Code
from outrider.providers.cpu.fusion.activations import fuse_activations
from outrider.providers.cpu.fusion.chains import fuse_chains
from outrider.providers.cpu.fusion.cleaning import clean, fold_constants, fold_dequantized
from outrider.providers.cpu.fusion.draft import Draft
from outrider.providers.cpu.fusion.epilogues import fuse_products
from outrider.providers.cpu.fusion.forward import fuse_forward
from outrider.providers.cpu.fusion.integers import (
    fuse_integer_products,
    fuse_quantized_results,
    fuse_roundings,
)
from outrider.providers.cpu.fusion.normalization import fuse_batch_normalizations, fuse_normalizations
from outrider.providers.cpu.fusion.products import fuse_lookups, fuse_operands, fuse_tables
from outrider.providers.cpu.fusion.softmax import fuse_softmaxes
from outrider.providers.cpu.fusion.views import sink_views

Pass = Callable[[Draft], None]

PASSES: tuple[Pass, ...] = (
    fold_constants,
    Draft.infer,
    fuse_integer_products,
    fuse_roundings,
    fold_dequantized,
    Draft.infer,
    clean,
    fuse_lookups,
    fuse_activations,
    fuse_tables,
    fuse_normalizations,
    fuse_operands,
    fuse_softmaxes,
    sink_views,
    fuse_products,
    fuse_forward,
    fuse_quantized_results,
    fuse_batch_normalizations,
    fuse_chains,
)


def fuse(code: Code) -> Counter[str]:
    """Fuse the ops of a unit and of its bodies. Returns how many ops each pattern made."""
    counts: Counter[str] = Counter()
    _fuse(code, code.top, counts)
    return counts


def _fuse(code: Code, block: Block, counts: Counter[str]) -> None:
    for op in block.ops:
        for body in op.bodies.values():
            _fuse(code, body, counts)
        if op.bodies:
            op.note_reads()
    draft = Draft(code, block, counts)
    for run in PASSES:
        run(draft)
    draft.finish()
