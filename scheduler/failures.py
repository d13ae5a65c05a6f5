"""From a worker's `Failed` message to the error the caller gets."""

from __future__ import annotations

from outrider.providers.contract import KernelError
from outrider.providers.wire import messages
from outrider.providers.wire.failures import error_from_plain, first_names
from outrider.scheduler import errors
from outrider.scheduler.generation import Generation
from outrider.shm.errors import OutriderError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutriderError)]


def error_of(message: messages.Failed, generation: Generation) -> OutriderError:
    """The typed error a worker raised, with the provider's name filled in; anything else becomes a KernelError."""
    owners = (
        side.worker.name
        for board, side in generation.sides.items()
        if message.partition in generation.partitions_of[board]
    )
    provider = next(owners, None)
    error = error_from_plain(message.error, KINDS)
    if error is None:
        known = message.partition < len(generation.partition_nodes)
        nodes = generation.partition_nodes[message.partition] if known else []
        cause = f"{message.error.get('type')}: {message.error.get('message')}"
        error = KernelError(
            f"provider {provider} failed in partition {message.partition} ({first_names(nodes)}): {cause}",
            node=nodes[0] if len(nodes) == 1 else None,
            cause=cause,
            remote_traceback=message.error.get("traceback"),
        )
    if "provider" in error._fields and error.provider is None:
        return type(error)(error.message, **{**error.fields(), "provider": provider})
    return error
