"""Lists what the cpu provider serves, out of its registry of kernels.

python docs/operators/make.py            # print
python docs/operators/make.py --write    # write docs/operators.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import outrider.providers.cpu  # noqa: F401 (registers the kernels)
from outrider.providers.cpu.claims import CONTROL
from outrider.providers.cpu.kernels.frame import KERNELS, Kernel
from outrider.providers.cpu.native import FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "operators.md"

HEAD = """\
# Operators of the cpu provider

*Made by `python docs/operators/make.py --write`; a test keeps it equal to the registry of kernels.*

Every operator here has a kernel in NumPy. The last column names the families of compiled kernels that do its work where
the library is there (see "Compiled kernels" in the README) and the tensors are float32, or int8 and uint8 for
`quantized`; everything else runs in NumPy. Any kernel may copy through the family `copy`.

*Opset* is the first version of the operator set whose form the kernel takes; nodes of earlier opsets are converted when
a model is loaded, where ONNX can do that. *Takes* gives the dtypes of inputs by position, where the kernel restricts
them: *floats* are float16, bfloat16, float32 and float64; *integers* int8 to int64 and uint8 to uint64; *numbers* both.

An operator of ONNX that is not here is served by `onnx.reference` if that can do it, slowly, and the placement report
says so.
"""

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
GROUPS = {"numbers": FLOATS | INTEGERS, "floats": FLOATS, "integers": INTEGERS}
DOMAINS = {
    "": "ONNX",
    "ai.onnx.ml": "ai.onnx.ml",
    "com.microsoft": "com.microsoft",
    "outrider": "Fused",
}
ABOUT = {
    "com.microsoft": "What ONNX Runtime's quantiser and optimiser write into models.",
    "outrider": 'What neighbouring nodes of one unit become with `optimization="all"`. No model can ask for them.',
}


def grouped(dtypes: Iterable[str]) -> str:
    """Dtypes in words, groups first."""
    left, words = set(dtypes) - {"undefined"}, []
    for name, group in GROUPS.items():
        if group <= left:
            words.append(name)
            left -= group
    return ", ".join([*words, *sorted(left)])


def takes(kernel: Kernel[object]) -> str:
    """The dtypes of the inputs by position; equal neighbours are told once."""
    told = {i: grouped(dtypes) for i, dtypes in sorted(kernel.dtypes.items())}
    if not told:
        return "any"
    places = {words: [i for i in told if told[i] == words] for words in told.values()}
    return "; ".join(f"{_positions(found)}: {words}" for words, found in places.items())


def _positions(found: list[int]) -> str:
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}–{found[-1]}"
    return ", ".join(map(str, found))


def rows(domain: str) -> Iterator[str]:
    """The table of a domain, line by line."""
    yield "| operator | opset | takes | compiled |"
    yield "|---|---|---|---|"
    lines = {}
    for (of, op), kernels in KERNELS.items():
        for kernel in kernels if of == domain else ():
            families = ", ".join(f"`{name}`" for name in FAMILIES if name in kernel.compiled)
            lines[op, kernel.since] = f"| {op} | {kernel.since} | {takes(kernel)} | {families} |"
    if domain == "":
        for op, since in CONTROL.items():
            lines[op, since] = f"| {op} | {since} | any; its bodies run in the worker | |"
    yield from (lines[key] for key in sorted(lines))


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for domain, title in DOMAINS.items():
        table = "\n".join(rows(domain))
        about = f"{ABOUT[domain]}\n\n" if domain in ABOUT else ""
        parts.append(f"## {title}\n\n{about}{table}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
