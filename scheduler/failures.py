"""From a worker's `Failed` message to the error the caller gets."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.providers.contract import ClaimBrokenError, KernelError
from outrider.providers.wire import messages
from outrider.providers.wire.errors import BrokenEdgeError
from outrider.providers.wire.failures import error_from_plain, first_names
from outrider.scheduler import errors
from outrider.scheduler.generation import Generation
from outrider.shm.errors import OutriderError

# What this module and the session say of themselves no worker can say: it does not even know those classes.
KINDS = [
    kind
    for kind in (*vars(errors).values(), BrokenEdgeError)
    if isinstance(kind, type) and issubclass(kind, OutriderError) and kind.__module__ != errors.__name__
]


def error_of(message: messages.Failed, generation: Generation, provider: str) -> OutriderError:
    """The typed error that a worker raised in a partition of its own, under the name of its provider.

    Anything else than an error that a worker can raise becomes a KernelError.
    """
    error = error_from_plain(message.error, KINDS)
    if error is None:
        nodes = generation.partition_nodes[message.partition]
        cause = f"{message.error.get('type')}: {message.error.get('message')}"
        error = KernelError(
            f"provider {provider} failed in partition {message.partition} ({first_names(nodes)}): {cause}",
            node=nodes[0] if len(nodes) == 1 else None,
            cause=cause,
            remote_traceback=message.error.get("traceback"),
        )
    if isinstance(error, ClaimBrokenError) and error.nodes:
        error = _with_own_nodes(error, generation.partition_nodes[message.partition])
    return under_name(error, provider)


def _with_own_nodes(error: ClaimBrokenError, own: Sequence[str]) -> ClaimBrokenError:
    """A claim is taken back on nodes of the partition that failed; on all of them where the error names others only.

    Otherwise the model would be placed as before, fail, and be placed again.
    """
    told = error.nodes if isinstance(error.nodes, list) else []
    named = {name for name in told if isinstance(name, str)}
    nodes = [name for name in own if name in named] or list(own)
    return ClaimBrokenError(error.message, **{**error.fields(), "nodes": nodes})


def under_name(error: OutriderError, provider: str) -> OutriderError:
    """The error with the provider that it came from: a worker cannot speak for another."""
    if "provider" not in error._fields or error.provider == provider:
        return error
    return type(error)(error.message, **{**error.fields(), "provider": provider})
