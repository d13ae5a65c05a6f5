"""The `outrider` command.

Exit codes: 0 right; 1 outputs differ from those expected; 2 bad usage or input; 3 any other OutriderError (a provider
that does not start, a worker that died, a node that nobody claims) or failed check of `doctor`.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence

from outrider import __version__
from outrider.scheduler import errors
from outrider.tools import bench, doctor, inspect, run
from outrider.tools.inputs import DataFileError

USAGE, FAILED = 2, 3
_TRACEBACK = "Traceback (most recent call last):"
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
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (run, inspect, doctor, bench):
        module.add_parser(commands)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; argparse raises SystemExit for --help, --version and bad usage."""
    args = build_parser().parse_args(arguments)
    if sys.path[0] not in ("", os.getcwd()):
        sys.path.insert(0, os.getcwd())  # `module:Class` of the current folder; workers get this path
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED, args.debug)
    except BrokenPipeError:
        # Whoever read our output has left. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except errors.OutriderError as error:
        return _fail(str(error), USAGE if isinstance(error, _USAGE_ERRORS) else FAILED, args.debug)
    except Exception as error:
        text = f"this is a bug in outrider, {type(error).__name__}: {error}. Run again with --debug to see where."
        return _fail(text, FAILED, args.debug)


def _fail(text: str, code: int, debug: bool) -> int:
    """One readable paragraph on stderr; lists keep their lines, tracebacks (ours, a worker's) need --debug."""
    if debug:
        traceback.print_exc()
    elif _TRACEBACK in text:
        text = text[: text.index(_TRACEBACK)].rstrip() + "\nRun again with --debug to see the traceback."
    first, *others = f"outrider: {text}".splitlines()
    print(textwrap.fill(first, 100, break_long_words=False, break_on_hyphens=False), *others, sep="\n", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
