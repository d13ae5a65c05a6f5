"""A provider's own pass over a unit before it is compiled, and what is asked of the result."""

from __future__ import annotations

from outrider.providers.contract import Provider, ProviderContractError, Unit


def rewritten(provider: Provider, unit: Unit) -> Unit:
    """What the provider makes of the unit. Raises ProviderContractError for what does not stand for the same."""
    made = provider.rewrite(unit)
    wrong = _wrong(unit, made)
    if wrong:
        raise ProviderContractError(
            f"rewrite() returned {wrong}; it must return a unit of the same inputs and outputs whose nodes, in order, "
            "read only inputs, constants and what earlier ones make",
            node=unit.nodes[-1].name,
            expected="a unit that stands for the same",
            got=wrong,
        )
    return made


def _wrong(unit: Unit, made: Unit) -> str:
    if not isinstance(made, Unit):
        return f"a {type(made).__name__}, no Unit"
    for name in ("inputs", "outputs", "optimization"):
        if getattr(made, name) != getattr(unit, name):
            return f"other {name} than the unit has"
    known = {"", *(value.name for value in unit.inputs), *made.constants}
    for node in (*made.constant_nodes, *made.nodes):
        for value in (*node.inputs, *node.captures):
            if value.name not in known:
                return f"a node {node.name!r} that reads {value.name!r}, which nothing before it makes"
        for value in node.outputs:
            if value.name and value.name in known:
                return f"a node {node.name!r} that makes {value.name!r}, which is there already"
            known.add(value.name)
    missing = [value.name for value in unit.outputs if value.name not in known]
    return f"no node that makes {', '.join(map(repr, missing))}" if missing else ""
