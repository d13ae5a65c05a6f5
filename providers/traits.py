"""What a provider declares, looked at once when its worker has set it up, and what follows for a node."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outrider.providers.contract import Capabilities, Node, Provider, ProviderContractError, Value
from outrider.providers.wire.dtypes import NUMBER

SHAPES = ("any", "ranked", "static")
_FLAGS = ("merge", "per_signature", "wants_model", "writes_out", "strided", "writable")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Traits:
    """The options of the contract as one provider has them.

    `exports`, `rewrites`, `saves`: it defines `export`, `rewrite`, both `save` and `load`.
    """

    merge: bool = False
    per_signature: bool = False
    wants_model: bool = False
    writes_out: bool = False
    strided: bool = False
    writable: bool = False
    exports: bool = False
    rewrites: bool = False
    saves: bool = False
    capabilities: Capabilities = Capabilities()

    @property
    def loose(self) -> bool:
        """Whether values may pass from unit to unit that have no place in shared memory."""
        return self.strided or self.exports

    def plain(self) -> dict[str, Any]:
        """All of it as a message carries it: names and their values, `dtypes` a sorted list or None."""
        told = dataclasses.asdict(self)
        capabilities = told.pop("capabilities")
        dtypes = capabilities["dtypes"]
        return {**told, **capabilities, "dtypes": None if dtypes is None else sorted(dtypes)}


def traits_of(provider: Provider, name: str) -> Traits:
    """The traits of a provider that is set up, which is called `name`. Raises ProviderContractError."""
    flags = {}
    for flag in _FLAGS:
        value = getattr(provider, flag)
        if not isinstance(value, bool):
            raise _broken(name, f"{flag} must be True or False", repr(value))
        flags[flag] = value
    exports, rewrites, saves, loads = (defines(provider, one) for one in ("export", "rewrite", "save", "load"))
    if rewrites and flags["wants_model"]:
        raise _broken(name, "rewrite() and wants_model do not go together, the model is as written", "both")
    if saves != loads:
        raise _broken(name, "save() and load() are defined together", "save()" if saves else "load()")
    if not isinstance(provider.version, str):
        raise _broken(name, "version must be a str", repr(provider.version))
    return Traits(**flags, exports=exports, rewrites=rewrites, saves=saves, capabilities=_capabilities(provider, name))


def defines(provider: Provider, method: str) -> bool:
    """Whether a provider has a method of its own in place of the contract's."""
    return getattr(getattr(provider, method), "__func__", None) is not getattr(Provider, method)


def _capabilities(provider: Provider, name: str) -> Capabilities:
    earlier = getattr(provider, "accepts", None)  # of an older contract: it would be missed if nothing looked at it
    if isinstance(earlier, (set, frozenset, list, tuple)):
        raise _broken(name, "dtypes are declared by capabilities = Capabilities(dtypes=...)", f"accepts = {earlier!r}")
    told = provider.capabilities
    if not isinstance(told, Capabilities):
        raise _broken(name, "capabilities must be a Capabilities", repr(told))
    for flag in ("sequences", "maps", "optionals", "bodies"):
        if not isinstance(getattr(told, flag), bool):
            raise _broken(name, f"capabilities.{flag} must be True or False", repr(getattr(told, flag)))
    if told.shapes not in SHAPES:
        raise _broken(name, f"capabilities.shapes must be one of {', '.join(map(repr, SHAPES))}", repr(told.shapes))
    dtypes = told.dtypes
    if dtypes is None:
        return told
    named = isinstance(dtypes, (set, frozenset, list, tuple)) and all(isinstance(one, str) for one in dtypes)
    unknown = sorted(set(dtypes) - set(NUMBER) | {"undefined"} & set(dtypes)) if named else [repr(dtypes)]
    if unknown:
        raise _broken(name, "capabilities.dtypes must be None or a set of names like 'float32'", ", ".join(unknown))
    return dataclasses.replace(told, dtypes=frozenset(dtypes))


def lacking(node: Node, capabilities: Capabilities) -> str:
    """Why a node is outside of what a provider can be given; '' if it is not."""
    bodies = [body for _, body in node.bodies()]
    if bodies and not capabilities.bodies:
        return "it takes no node with a body"
    if capabilities.dtypes is not None:
        used = {word for value in _values(node) for word in _WORD.findall(value.dtype) if word in NUMBER}
        foreign = sorted(used - set(capabilities.dtypes) - {"undefined"})
        if foreign:
            return f"it does not accept {', '.join(foreign)}"
    for value in _values(node):
        reason = _value_lacking(value, capabilities)
        if reason:
            return reason
    for body in bodies:
        for inner in body.nodes:
            reason = lacking(inner, capabilities)
            if reason:
                return f"{reason} (in {inner.name})"
    return ""


def _values(node: Node) -> Iterator[Value]:
    yield from (value for values in (node.inputs, node.captures, node.outputs) for value in values if value.name)


def _value_lacking(value: Value, capabilities: Capabilities) -> str:
    for wrapper, taken in (
        ("sequence", capabilities.sequences), ("map", capabilities.maps), ("optional", capabilities.optionals),
    ):  # fmt: skip
        if not taken and f"{wrapper}(" in value.dtype:
            return f"it takes no {wrapper}s, and {value.name!r} is {value.dtype}"
    if "(" in value.dtype:  # what it consists of has shapes, it has none
        return ""
    if capabilities.shapes != "any" and value.shape is None:
        return f"it takes known shapes only, and of {value.name!r} not even the rank is known"
    if capabilities.shapes == "static" and any(not isinstance(dim, int) for dim in value.shape or ()):
        dims = ", ".join("?" if dim is None else str(dim) for dim in value.shape or ())
        return f"it takes known shapes only, and that of {value.name!r} is [{dims}]"
    return ""


def _broken(name: str, expected: str, got: str) -> ProviderContractError:
    return ProviderContractError(
        f"provider {name}: {expected}; it gave {got[:200]}", provider=name, expected=expected, got=got[:200]
    )
