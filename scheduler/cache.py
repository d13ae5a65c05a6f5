"""Lasting files of Outrider: JSON in `$OUTRIDER_CACHE`, or `$XDG_CACHE_HOME/outrider`, or `~/.cache/outrider`.

What lies there saves time and nothing else: a file that is missing, unreadable or damaged counts as not there, and a
folder that cannot be written to keeps nothing. A file is written beside its place and then moved there, so that
processes that write at once leave one whole file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from typing import Any

VARIABLE = "OUTRIDER_CACHE"

log = logging.getLogger("outrider.cache")


def cache_folder() -> str | None:
    """The folder, which need not exist; None where there is no home to put it in."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return os.path.abspath(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG rules have a relative one ignored
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "outrider") if os.path.isabs(base) else None


def read(path: str) -> Any:
    """The data in a file; None if there is none that can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.info("%s is not used: %s", path, str(error))
        return None


def write(path: str, data: Any) -> bool:
    """Write plain data, whole or not at all, in folders made where they are missing; False where that is impossible."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd, beside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".", suffix=".new")  # mode 0600
    except OSError as error:
        log.info("%s is not kept: %s", path, str(error))
        return False
    try:
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if not isinstance(error, OSError):
            raise
        log.info("%s is not kept: %s", path, str(error))
        return False
    return True


def remove(path: str) -> None:
    """Have no file there, if that is possible."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.info("%s cannot be removed: %s", path, str(error))


def bound(folder: str, suffix: str, most: int) -> None:
    """Keep at most this many files of a kind in a folder, those written last."""
    with contextlib.suppress(OSError):
        found = [entry for entry in os.scandir(folder) if entry.name.endswith(suffix)]
        if len(found) > most:
            found.sort(key=lambda entry: entry.stat().st_mtime)
            for entry in found[: len(found) - most]:
                os.unlink(entry.path)
