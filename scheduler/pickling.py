"""What travels through pickle: options, specs, errors and reports as they are, a session as what it was made of.

Unpickling a session makes another one from the same path, providers and options, with workers of its own: that is how
one reaches a process that `multiprocessing` has spawned. What belongs to this process, or to memory that it shares with
its workers, refuses. `copy.copy` and `copy.deepcopy` do as pickle does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.scheduler.errors import NotPicklableError

if TYPE_CHECKING:
    from outrider.scheduler.options import ProviderSpec, SessionOptions


@dataclass(frozen=True)
class Recipe:
    """What a session was made of: the absolute `path` of its model, None where it was given as bytes or proto."""

    path: str | None
    specs: Sequence[ProviderSpec]
    options: SessionOptions

    @classmethod
    def of(cls, model: Any, specs: Sequence[ProviderSpec], options: SessionOptions) -> Recipe:
        """What the arguments of a session come to."""
        named = isinstance(model, (str, os.PathLike))
        return cls(
            os.path.abspath(os.fsdecode(model)) if named else None,
            list(specs),
            options,
        )

    def reduced(self, session: type) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """For `__reduce__` of a session of this class. Raises NotPicklableError."""
        if self.path is None:
            reason = "its model was given as bytes or proto: make it from a file"
            raise not_picklable("InferenceSession", reason)
        if self.options.fleet is not None:
            reason = "it runs on a Fleet, which belongs to this process: make one in the other process"
            raise not_picklable("InferenceSession", reason)
        return _made_again, (session, self.path, self.specs, self.options)


def _made_again(session: type, path: str, specs: Sequence[ProviderSpec], options: SessionOptions) -> Any:
    return session(path, providers=specs, options=options)


def not_picklable(what: str, reason: str) -> NotPicklableError:
    """The refusal, which says what to do instead."""
    return NotPicklableError(f"this {what} cannot be pickled or copied: {reason}", what=what, reason=reason)


def refusing(what: str, reason: str) -> Callable[[object], tuple[Any, ...]]:
    """A `__reduce__` that refuses."""

    def __reduce__(self: object) -> tuple[Any, ...]:
        raise not_picklable(what, reason)

    return __reduce__
