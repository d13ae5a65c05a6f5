"""Every error of Outrider in one place.

All derive from OutriderError, end in Error, also inherit the built-in that fits, pickle, and carry their facts as
attributes named in `_fields` (None where not known). Errors of memory come from `outrider.shm.errors`, those a worker
raises from `outrider.providers.contract`, those of models, pins and claims from the modules that find them; this module
re-exports them and adds those of the session.
"""

from __future__ import annotations

from outrider.providers.contract import (
    ClaimBrokenError,
    KernelError,
    ProviderContractError,
    ProviderUnavailableError,
)
from outrider.providers.wire.errors import ProtocolMismatchError, RunCancelledError, WireError
from outrider.scheduler.model_errors import ModelLimitError, ModelLoadError, ModelNotFoundError
from outrider.scheduler.pins import PinNotFoundError, UnknownProviderError
from outrider.scheduler.planning import ClaimError
from outrider.shm.errors import (
    ChannelClosedError,
    ChannelFullError,
    DescriptorError,
    LayoutError,
    OutOfMemoryError,
    OutriderError,
    WeightFileChangedError,
)

__all__ = [
    "ChannelClosedError", "ChannelFullError", "ClaimBrokenError", "ClaimError", "ConfigEntryNotFoundError",
    "DescriptorError", "DtypeMismatchError", "ForkedSessionError", "HeterogeneousPlacementRequiredError",
    "InputNotFoundError", "InputTypeError", "InvalidOptionError", "KernelError", "LayoutError", "ModelLimitError",
    "ModelLoadError", "ModelNotFoundError", "NoSuchNameError", "NotPicklableError", "OutOfMemoryError",
    "OutputNotFoundError", "OutriderError",
    "PinDeclinedError", "PinNotFoundError", "ProtocolMismatchError", "ProviderContractError",
    "ProviderUnavailableError", "QueueFullError", "RankMismatchError", "RunCancelledError", "RunTimeoutError",
    "SessionClosedError", "ShapeMismatchError", "SymbolConflictError", "TraceError", "UnknownOptionError",
    "UnknownProviderError", "UnsupportedOpError", "UnsupportedOptionError", "WeightFileChangedError", "WireError",
    "WorkerDiedError",
]  # fmt: skip


# Options ----------------------------------------------------------------------------------------------------------


class UnknownOptionError(OutriderError, TypeError, ValueError, AttributeError):
    """No option has this name. TypeError as for any unknown keyword, ValueError as for any unknown key of `config`,
    AttributeError as for any unknown attribute that is set."""

    _fields = ("name", "known")


class ConfigEntryNotFoundError(OutriderError, LookupError, RuntimeError):
    """A session or run entry was asked for that was not set; RuntimeError as in onnxruntime. `known`: those set."""

    _fields = ("key", "known")


class InvalidOptionError(OutriderError, ValueError):
    """An option has a value it cannot take. `value` is as given, or its repr; `expected` says what is accepted."""

    _fields = ("name", "value", "expected")


class UnsupportedOptionError(OutriderError, NotImplementedError):
    """An option, method or provider kind that exists by design but is not built yet. Nothing was started."""

    _fields = ("option", "value", "reason")


class NoSuchNameError(UnsupportedOptionError, AttributeError):
    """onnxruntime has this name, Outrider does not, for a `reason`; `hasattr` is False for it."""


# Inputs and outputs of a run --------------------------------------------------------------------------------------


class InputNotFoundError(OutriderError, ValueError):
    """A fed name is no input of the model, or a required input was not fed. `known`: the model's inputs."""

    _fields = ("name", "known")


class OutputNotFoundError(OutriderError, ValueError):
    """A requested name is no output of the model. `known`: the model's outputs."""

    _fields = ("name", "known")


class InputTypeError(OutriderError, TypeError):
    """What was fed cannot be made into a value of the declared type (or the feed itself is not a mapping)."""

    _fields = ("name", "expected", "got")


class DtypeMismatchError(OutriderError, TypeError):
    """An input has another dtype than declared; `expected` and `got` are ONNX names ('float32')."""

    _fields = ("name", "expected", "got")


class RankMismatchError(OutriderError, ValueError):
    """An input has another number of dimensions than declared; `expected` and `got` are ranks."""

    _fields = ("name", "expected", "got")


class ShapeMismatchError(OutriderError, ValueError):
    """An input differs from the declared shape in a fixed dimension, number `axis`; `expected`, `got` are shapes."""

    _fields = ("name", "expected", "got", "axis")


class SymbolConflictError(OutriderError, ValueError):
    """One symbol of the declared shapes got two sizes: `first` in `first_input`, then `second` in `second_input`."""

    _fields = ("symbol", "first", "second", "first_input", "second_input")


# Placement --------------------------------------------------------------------------------------------------------


class UnsupportedOpError(OutriderError, NotImplementedError):
    """No provider claimed some nodes.

    `groups`: all of them as the placement report has them (dicts of domain, op, provider, reason, count, examples), in
    its fixed order. `op_type`, `domain`, `node`, `opset`, `reason` tell the first one, `execution_providers` who was
    asked, in order, `nodes` every unclaimed node in graph order.
    """

    _fields = ("op_type", "domain", "node", "opset", "reason", "execution_providers", "groups", "nodes")


class HeterogeneousPlacementRequiredError(OutriderError, RuntimeError):
    """A provider with `required='all'` does not have every node. `nodes`: those it does not have, in graph order.

    `groups`: why, as the placement report has it (see UnsupportedOpError).
    """

    _fields = ("provider", "nodes", "groups")


class PinDeclinedError(OutriderError, ValueError):
    """A node is pinned to a provider that does not take it. `reason` is that provider's."""

    _fields = ("pin", "node", "provider", "reason")


# Runs and workers -------------------------------------------------------------------------------------------------


class WorkerDiedError(OutriderError, RuntimeError):
    """A worker ended while the session needed it.

    - `provider`, `device` (the number after its kind), `incarnation` (its starts, counted from 1): which one.
    - `phase`: what it was doing: 'start', 'claim', 'load', 'run', 'idle', 'stop'. `partition`, `nodes` and `step` (how
      many units of the partition had run): where it was; None and [] when unknown or idle.
    - `exit_code`, and `signal`, its name ('SIGSEGV') if it was one: how it ended. `reason`: why we killed it, None if
      we did not. `hint`: what that means and what to do, None where nobody knows; it speaks of memory only if the
      system said so.
    - `stack`: the Python stacks of its threads, '' if it left none. `stderr`: the last 64 KiB that the process wrote to
      its standard output and error, native code included.
    - `attempts`: the earlier deaths in the same run, oldest first, as dicts with these names; of `stderr` the last
      2,000 characters.
    """

    _fields = (
        "provider", "device", "incarnation", "phase", "partition", "nodes", "step", "signal", "exit_code", "reason",
        "hint", "stack", "stderr", "attempts",
    )  # fmt: skip

    def again(self) -> WorkerDiedError:
        """The same death, to be raised for one more caller: a raised error keeps the frames that it passed."""
        return WorkerDiedError(self.message, **self.fields())


class RunTimeoutError(OutriderError, TimeoutError):
    """A run took longer than its `deadline`, in seconds.

    `running`: what each worker that was on it was doing: dicts of provider, incarnation, partition, nodes, step, stack.
    """

    _fields = ("deadline", "running")


class QueueFullError(OutriderError, RuntimeError):
    """More runs wait than `queue_size` allows."""

    _fields = ("queue_size",)


class SessionClosedError(OutriderError, RuntimeError):
    """The session or fleet was closed before this call. Results obtained earlier stay valid."""

    _fields = ("what",)


class TraceError(OutriderError, RuntimeError):
    """A trace cannot begin, because one is on; cannot end, because none is; or cannot be written to `path`."""

    _fields = ("path", "reason")


class NotPicklableError(OutriderError, TypeError):
    """A `what` cannot be pickled or copied, for this reason."""

    _fields = ("what", "reason")


class ForkedSessionError(OutriderError, RuntimeError):
    """A session was used in a fork of the process that made it. Make the session after the fork."""

    _fields = ("owner_pid", "pid")
