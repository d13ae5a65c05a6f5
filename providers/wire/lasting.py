"""Lasting files of Outrider, in `$OUTRIDER_CACHE`, or `$XDG_CACHE_HOME/outrider`, or `~/.cache/outrider`.

What lies there saves time and nothing else: a file that is missing, unreadable or damaged counts as not there, and a
folder that cannot be written to keeps nothing. A file is written beside its place and then moved there, so that
processes that write at once leave one whole file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile

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


def read_bytes(path: str) -> bytes | None:
    """What is in a file; None if there is none that can be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.info("%s is not used: %s", path, str(error))
        return None


def write_bytes(path: str, *chunks: bytes | memoryview) -> bool:
    """Write a file, whole or not at all, in folders made where they are missing; False where that is impossible."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd, beside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".", suffix=".new")  # mode 0600
    except OSError as error:
        log.info("%s is not kept: %s", path, str(error))
        return False
    try:
        with open(fd, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if not isinstance(error, OSError):
            raise
        log.info("%s is not kept: %s", path, str(error))
        return False
    return True


def write_checked(path: str, content: bytes) -> bool:
    """`write_bytes` with a digest in front, by which `read_checked` tells whether it is whole."""
    return write_bytes(path, hashlib.blake2b(content).digest(), content)


def read_checked(path: str) -> memoryview | None:
    """What `write_checked` wrote; None if there is nothing. A file that is damaged is removed, with a warning."""
    found = read_bytes(path)
    if found is None:
        return None
    size = hashlib.blake2b().digest_size
    content = memoryview(found)[size:]
    if hashlib.blake2b(content).digest() == found[:size]:
        return content
    log.warning("%s is damaged and is removed", path)
    remove(path)
    return None


def remove(path: str) -> None:
    """Have no file there, if that is possible."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.info("%s cannot be removed: %s", path, str(error))


def bound(folder: str, suffix: str, most: int, most_bytes: int | None = None) -> None:
    """Keep at most this many files of a kind in a folder, and bytes in them: those written or touched last."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        found = [(entry.path, entry.stat()) for entry in entries if entry.name.endswith(suffix)]
        found.sort(key=lambda one: one[1].st_mtime_ns, reverse=True)
        nbytes = 0
        for position, (path, facts) in enumerate(found):
            nbytes += facts.st_size
            if position >= most or (most_bytes is not None and nbytes > most_bytes):
                remove(path)
