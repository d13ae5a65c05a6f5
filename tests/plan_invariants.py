"""The invariants of a plan, checked node by node."""

from collections.abc import Sequence

from outrider.scheduler.planning import Offer, Plan, PlanNode, PlanUnit, ProviderTraits


def violations(
    made: Plan, nodes: Sequence[PlanNode], offers: Sequence[Offer], providers: Sequence[ProviderTraits]
) -> list[str]:
    """What is wrong with a plan, in words; nothing if it keeps the invariants that everything after it relies on.

    Each claimed node that is not constant lies in exactly one unit, of its owner; claims are whole; partitions follow
    one another so that whatever a node reads was made before it, in its unit or an earlier one.
    """
    wrong: list[str] = []
    if [unit for partition in made.partitions for unit in partition.units] != list(range(len(made.units))):
        wrong.append("partitions do not list every unit once and in order")
    for partition in made.partitions:
        if any(made.units[unit].provider != partition.provider for unit in partition.units):
            wrong.append(f"a partition of provider {partition.provider} holds a unit of another")
    units_of: dict[int, list[PlanUnit]] = {}
    for unit in made.units:
        for position in unit.nodes:
            units_of.setdefault(position, []).append(unit)
    for position, node in enumerate(nodes):
        providers_of = [unit.provider for unit in units_of.get(position, [])]
        if node.constant:
            continue
        if providers_of != [made.owner[position]] and (providers_of or made.owner[position] is not None):
            wrong.append(f"{node.name} of provider {made.owner[position]} lies in units of {providers_of}")
        if not providers_of and position not in made.unclaimed:
            wrong.append(f"{node.name} is neither in a unit nor unclaimed")
    makers = {value: position for position, node in enumerate(nodes) for value in node.outputs}
    done: set[int] = set()
    for number, unit in enumerate(made.units):
        constants: set[int] = set()
        for position in unit.constant_nodes:
            if not nodes[position].constant or any(
                makers[value] not in constants for value in nodes[position].inputs if value in makers
            ):
                wrong.append(f"unit {number} cannot compute {nodes[position].name} from constants")
            constants.add(position)
        for position in unit.nodes:
            for value in nodes[position].inputs:
                maker = makers.get(value)
                if maker is not None and maker not in done and maker not in constants and maker not in made.unclaimed:
                    wrong.append(f"unit {number}: {nodes[position].name} reads {value}, which is not made before it")
            done.add(position)
        if providers[unit.provider].merge:
            for claim in unit.claims:
                if any(p not in unit.nodes for p in offers[claim].nodes if not nodes[p].constant):
                    wrong.append(f"unit {number} holds claim {claim} in part")
        elif unit.constant_nodes or [sorted(offers[claim].nodes) for claim in unit.claims] != [list(unit.nodes)]:
            wrong.append(f"unit {number} is not exactly its claim")
    return wrong
