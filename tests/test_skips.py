"""The list of reasons for skipping tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.skips import REASONS, objection

pytestmark = pytest.mark.fast

CALLS = ("skip", "skipif", "importorskip")


def _calls() -> list[str]:
    """The text of each call in the tests that may skip one, with that of the function around it."""
    found = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
                found.append(ast.get_source_segment(text, node) or "")
    return found


def test_each_reason_is_still_given_somewhere() -> None:
    text = "\n".join(path.read_text() for path in Path(__file__).parent.rglob("*.py") if path.name != "skips.py")
    for pattern in REASONS:
        assert re.search(pattern, text), pattern
    assert not [call for call in _calls() if "importorskip" in call]


def test_an_unlisted_or_false_reason_is_an_objection() -> None:
    assert objection("too slow today") == "the reason is not listed in tests/skips.py"
    for pattern, holds in REASONS.items():
        said = objection(f"because of {pattern.split('|')[0]}")
        assert said == ("" if holds() else "the reason does not hold on this machine")
