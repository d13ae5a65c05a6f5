"""What commands share: how models and providers are named, the options of a session, progress while it opens."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from outrider.scheduler.errors import InvalidOptionError
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.spec_file import read_providers
from outrider.scheduler.specs import parse_list, parse_provider

BUNDLED = {"@basic-pitch": "nmp.onnx"}
SPECS = (  # how one is written
    "cpu, null, ort, ort:NAME, package.module:Class, file.py:Class; a trailing :n tells instances apart, "
    "'?key=value&...' gives fields (threads=1, python=PATH, required=false, env.NAME=...) and options"
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --providers, --providers-file, --pin, --optimization, --strategy."""
    parser.add_argument("model", metavar="MODEL", help="a .onnx file, or @basic-pitch for the bundled example")
    add_provider_arguments(parser, "cpu")
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


def add_provider_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """--providers and --providers-file, of which one may be given. `default`: what neither of them means."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--providers", metavar="LIST",
        help=f"comma-separated, in priority order: {SPECS} (default: $OUTRIDER_PROVIDERS, else {default})",
    )  # fmt: skip
    either.add_argument("--providers-file", metavar="FILE.toml", help="a file that lists them as [[provider]] tables")


def chosen_providers(args: argparse.Namespace) -> list[ProviderSpec] | None:
    """What the two arguments say; None if neither was given. Raises the errors of provider entries."""
    if args.providers_file is not None:
        return read_providers(args.providers_file)
    return None if args.providers is None else parse_list(args.providers)


def one_provider(text: str, file: str | None) -> ProviderSpec:
    """The provider that SPEC means: with a file of providers the one that is called so there."""
    if file is None:
        return parse_provider(text)
    listed = read_providers(file)
    found = next((spec for spec in listed if spec.display == text), None)
    if found is None:
        names = ", ".join(spec.display for spec in listed)
        message = f"{file} lists no provider {text!r}; it lists {names}."
        raise InvalidOptionError(message, name="--providers-file", value=text, expected=names)
    return found


def model_path(text: str) -> str:
    """The file that MODEL names. Raises InvalidOptionError for an unknown bundled one."""
    if not text.startswith("@"):
        return text
    if text not in BUNDLED:
        known = ", ".join(BUNDLED)
        message = f"there is no bundled model {text!r}; there is {known}. A file is given by its path."
        raise InvalidOptionError(message, name="model", value=text, expected=known)
    return str(files("outrider.tools") / "models" / BUNDLED[text])


def parse_pairs(option: str, texts: list[str]) -> dict[str, str]:
    """`left=right` texts as a dict, in order; the last '=' divides. Raises InvalidOptionError."""
    pairs = {}
    for text in texts:
        left, equals, right = text.rpartition("=")
        if not equals or not left or not right:
            raise InvalidOptionError(
                f"{option} {text}: expected name=value.", name=option, value=text, expected="name=value"
            )
        pairs[left] = right
    return pairs


def open_session(args: argparse.Namespace) -> Any:
    """The session that the arguments describe."""
    from outrider.scheduler import InferenceSession, SessionOptions

    pins = parse_pairs("--pin", args.pin)
    options = SessionOptions(optimization=args.optimization, strategy=args.strategy, pins=pins)
    path = model_path(args.model)
    providers = chosen_providers(args)
    with progress(f"starting workers and loading {os.path.basename(path)}"):
        return InferenceSession(path, providers=providers, options=options)


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
