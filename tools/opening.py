"""What `run` and `inspect` share: the model's path, the options of the session, progress while it opens."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from outrider.scheduler.errors import InvalidOptionError

BUNDLED = {"@basic-pitch": "nmp.onnx"}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --providers, --pin, --optimization, --strategy."""
    parser.add_argument("model", metavar="MODEL", help="a .onnx file, or @basic-pitch for the bundled example")
    parser.add_argument(
        "--providers", default="cpu", metavar="LIST",
        help="comma-separated, in priority order: cpu, null, package.module:Class, file.py:Class; "
        "a trailing :n tells instances apart (default: cpu)",
    )  # fmt: skip
    parser.add_argument(
        "--pin", action="append", default=[], metavar="NODE=PROVIDER",
        help="give a node, or all that match a pattern, to one provider; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--optimization", default="all", metavar="LEVEL", help="none, basic or all (default: all)"
    )  # fmt: skip
    parser.add_argument(
        "--strategy", default="priority", metavar="NAME",
        help="priority, cost, pipeline or replicate (default: priority)",
    )  # fmt: skip


def model_path(text: str) -> str:
    """The file that MODEL names. Raises InvalidOptionError for an unknown bundled one."""
    if not text.startswith("@"):
        return text
    if text not in BUNDLED:
        known = ", ".join(BUNDLED)
        message = f"there is no bundled model {text!r}; there is {known}. A file is given by its path."
        raise InvalidOptionError(message, name="model", value=text, expected=known)
    return str(files("outrider.tools") / "models" / BUNDLED[text])


def parse_pairs(option: str, texts: list[str], first: bool = False) -> dict[str, str]:
    """`left=right` texts as a dict, in order; the last '=' divides, or the `first`. Raises InvalidOptionError."""
    pairs = {}
    for text in texts:
        left, equals, right = text.partition("=") if first else text.rpartition("=")
        if not equals or not left or not (right or first):
            raise InvalidOptionError(
                f"{option} {text}: expected name=value.", name=option, value=text, expected="name=value"
            )
        pairs[left] = right
    return pairs


def provider_list(text: str) -> list[str]:
    """The entries of a comma-separated list; empty ones are an error of `providers` later on."""
    return [entry.strip() for entry in text.split(",")]


def open_session(args: argparse.Namespace) -> Any:
    """The session that the arguments describe."""
    from outrider.scheduler import InferenceSession, SessionOptions

    pins = parse_pairs("--pin", args.pin)
    options = SessionOptions(optimization=args.optimization, strategy=args.strategy, pins=pins)
    path = model_path(args.model)
    with progress(f"starting workers and loading {os.path.basename(path)}"):
        return InferenceSession(path, providers=provider_list(args.providers), options=options)


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """A spinner with this text on stderr while the block runs; nothing unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(text)):
        yield
