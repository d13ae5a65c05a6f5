"""`ProviderSpec.required`: which providers a session cannot do without, and what is said when it has to.

| `required` | it does not start | it declines nodes, or dies too often |
|---|---|---|
| `'start'` (default) | ProviderUnavailableError | the next claimant takes them |
| `False` | it is reported and left out | the same |
| `'all'` | ProviderUnavailableError | HeterogeneousPlacementRequiredError, or how it died: no other takes any |

Pure. What counts as a node of `'all'` is every node that some worker runs; constants that their readers fold do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.providers.contract import ProviderUnavailableError
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.errors import HeterogeneousPlacementRequiredError
from outrider.scheduler.options import ProviderSpec, SessionOptions
from outrider.scheduler.report import Refusal, group_declines
from outrider.scheduler.strategy import replicas


def check_required(specs: Sequence[ProviderSpec], options: SessionOptions) -> None:
    """Raises InvalidOptionError where two providers would have to have every node of one placement."""
    groups = replicas(specs, specs) if options.strategy == "replicate" else [specs]
    for group in groups:
        names = [spec.display for spec in group if spec.required == "all"]
        if len(names) > 1:
            expected = f"one provider of {', '.join(names)}: a node cannot be everybody's"
            raise invalid_option("required", "all", expected)


def not_started(error: ProviderUnavailableError, others: bool) -> ProviderUnavailableError:
    """The error for a provider that is required and does not start. `others`: the session has other providers."""
    if not others:
        return error
    first, line, rest = error.message.partition("\n")
    stop = "" if first.endswith((".", ":")) else "."
    way_out = "Mend that, or give it required=False to go on without it" + (":" if line else ".")
    if first.endswith(":"):
        first, stop = first[:-1], "."
    return ProviderUnavailableError(f"{first}{stop} {way_out}{line}{rest}", **error.fields())


def nobody(absent: Mapping[str, str]) -> ProviderUnavailableError:
    """The error for providers that are all optional and all absent."""
    lines = [f"  {name}: {reason}" for name, reason in absent.items()]
    return ProviderUnavailableError(
        "none of the providers has started:\n" + "\n".join(lines), provider=None, reason="\n".join(lines).strip()
    )


def not_all(provider: str, refusals: Sequence[Refusal], count: int) -> HeterogeneousPlacementRequiredError:
    """The error for a provider that must have every one of `count` nodes. `refusals`: those it does not have, and why.

    Its text is the same for the same refusals in whatever order.
    """
    groups = group_declines(refusals)
    lines = "\n".join(f"  {group}" for group in groups)
    return HeterogeneousPlacementRequiredError(
        f"provider {provider} is required to have every node and does not have {len(refusals)} of {count}:\n{lines}\n"
        "With required='start' the next provider that claims them takes them.",
        provider=provider,
        nodes=[one.node for one in refusals],
        groups=[group.to_dict() for group in groups],
    )
