"""Lasting files that hold JSON; what is said of all of them stands in `outrider.providers.wire.lasting`."""

from __future__ import annotations

import json
import logging
from typing import Any

from outrider.providers.wire.lasting import bound, cache_folder, read_bytes, remove, write_bytes

__all__ = ["bound", "cache_folder", "read", "remove", "write"]

log = logging.getLogger("outrider.cache")


def read(path: str) -> Any:
    """The data in a file; None if there is none that can be read."""
    found = read_bytes(path)
    if found is None:
        return None
    try:
        return json.loads(found)
    except (ValueError, RecursionError) as error:
        log.info("%s is not used: %s", path, str(error))
        return None


def write(path: str, data: Any) -> bool:
    """Write plain data, whole or not at all, in folders made where they are missing; False where that is impossible."""
    return write_bytes(path, json.dumps(data, indent=1).encode())
