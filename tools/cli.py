"""The `outrider` command.

Exit codes: 0 right; 1 outputs differ from those expected; 2 bad usage or input; 3 any other OutriderError (a provider
that does not start, a worker that died, a node that nobody claims) or failed check of `doctor`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence

from outrider import __version__
from outrider.scheduler import errors
from outrider.tools import doctor, inspect, run
from outrider.tools.bench import command as bench
from outrider.tools.conformance import command as conformance
from outrider.tools.inputs import DataFileError
from outrider.tools.text import visible

USAGE, FAILED = 2, 3
_TRACEBACK = "Traceback (most recent call last):"
_HINT = "\nRun again with --debug to see the traceback."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
INTERRUPTED, UNREAD = 130, 141  # as a shell reports SIGINT and SIGPIPE
# What the user can mend in the command or the files named there.
_USAGE_ERRORS = (
    DataFileError,
    FileNotFoundError,
    errors.DtypeMismatchError,
    errors.InputNotFoundError,
    errors.InputTypeError,
    errors.InvalidOptionError,
    errors.ModelLimitError,
    errors.ModelLoadError,
    errors.OutputNotFoundError,
    errors.PinNotFoundError,
    errors.RankMismatchError,
    errors.ShapeMismatchError,
    errors.SymbolConflictError,
    errors.UnknownOptionError,
    errors.UnknownProviderError,
    errors.UnsupportedOptionError,
)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = argparse.ArgumentParser(
        prog="outrider",
        description="Run one ONNX model across several worker processes.",
        epilog="Exit codes: 0 right, 1 outputs differ, 2 bad usage or input, 3 any other failure.",
    )
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    shown = "show tracebacks, and what workers print"
    parser.add_argument("--debug", action="store_true", help=shown)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (run, inspect, doctor, conformance, bench):
        module.add_parser(commands)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=shown)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; argparse raises SystemExit for --help, --version and bad usage."""
    _open_standard_streams()
    args = build_parser().parse_args(arguments)
    _add_current_folder()
    try:
        with _worker_output(args.debug):
            code: int = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED, args.debug)
    except BrokenPipeError:  # whoever read our output has left
        _drop_output()
        return UNREAD
    except errors.OutriderError as error:
        return _fail(str(error), USAGE if isinstance(error, _USAGE_ERRORS) else FAILED, args.debug, error)
    except ImportError as error:
        text = f"a package that outrider needs cannot be imported: {error}. `outrider doctor` lists what is there."
        return _fail(text, FAILED, args.debug)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            _drop_output()
            return _fail(f"the output cannot be written: {error.strerror}", FAILED, args.debug)
        text = f"this is a bug in outrider, {type(error).__name__}: {error}. Run again with --debug to see where."
        return _fail(text, FAILED, args.debug)


def _open_standard_streams() -> None:
    """Streams that were closed lead nowhere: no file or socket may get their numbers, and prints must not fail."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _drop_output() -> None:
    """Python would complain once more when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _add_current_folder() -> None:
    """`module:Class` of the current folder; workers get this path. All that we need is loaded before: a file called
    msgpack.py beside the model is not MessagePack."""
    with contextlib.suppress(ImportError):  # the command that needs it will tell
        importlib.import_module("outrider.scheduler.session")
    if sys.stderr.isatty():
        importlib.import_module("rich.console")
    with contextlib.suppress(OSError):  # the current folder may have been removed
        if sys.path[0] not in ("", os.getcwd()):
            sys.path.insert(0, os.getcwd())


@contextlib.contextmanager
def _worker_output(shown: bool) -> Iterator[None]:
    """What providers print, and their logs, on stderr with --debug."""
    logger = logging.getLogger("outrider")
    handler = logging.StreamHandler() if shown else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    if shown:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _fail(text: str, code: int, debug: bool, error: errors.OutriderError | None = None) -> int:
    """One readable paragraph on stderr; lists keep their lines, tracebacks (ours, a worker's) need --debug."""
    if debug:
        traceback.print_exc()
    elif _TRACEBACK in text:
        text = text[: text.index(_TRACEBACK)].rstrip()
        text = (f"{text[:-1]}." if text.endswith(":") else text) + _HINT
    elif getattr(error, "remote_traceback", None):
        text += _HINT
    first, *others = visible(f"outrider: {text}").splitlines()
    print(textwrap.fill(first, 100, break_long_words=False, break_on_hyphens=False), *others, sep="\n", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
