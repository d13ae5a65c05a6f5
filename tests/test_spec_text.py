"""Providers as text: what each part means, what is refused and where, and that what is written is read as the same."""

import contextlib
import json
import math
import os
import urllib.parse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.errors import InvalidOptionError, UnknownOptionError, UnknownProviderError
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.spec_file import read_providers
from outrider.scheduler.spec_text import FIELDS, arguments, split_entries, written
from outrider.scheduler.specs import parse_list, parse_provider, parse_providers

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", {}),
        ("cpu?threads=2&nice=5&debug=true", {"threads": 2, "nice": 5, "debug": True}),
        ("cpu?required=false", {"required": False}),
        ("cpu?required=all&name=a b", {"required": "all", "name": "a b"}),
        ("cpu?name=1", {"name": "1"}),
        ("cpu?python=/venv/bin/python", {"python": "/venv/bin/python"}),
        ("cpu?cpus=3", {"cpus": [3]}),
        ("cpu?cpus=0,2-4", {"cpus": [0, 2, 3, 4]}),
        ("cpu?cpus=[1,0]", {"cpus": [1, 0]}),
        ("cpu?memory_limit=4096", {"memory_limit": 4096}),
        ("cpu?memory_limit=2GiB", {"memory_limit": 2 << 30}),
        ("cpu?memory_limit=1.5 kB", {"memory_limit": 1500}),
        ("cpu?memory_limit=512mib", {"memory_limit": 512 << 20}),
        ("cpu?wrap=strace -f -o 'a b'", {"wrap": ["strace", "-f", "-o", "a b"]}),
        ('cpu?wrap=["gdb","--args"]', {"wrap": ["gdb", "--args"]}),
        ("cpu?env.A=1&env.B=", {"env": {"A": "1", "B": ""}}),
        ("cpu?a=1&b=-2.5e3&c=true&d=null", {"options": {"a": 1, "b": -2500.0, "c": True, "d": None}}),
        ("cpu?a=text&b=01&c=NaN&d=1e999&e=", {"options": {"a": "text", "b": "01", "c": "NaN", "d": "1e999", "e": ""}}),
        ('cpu?a="1"&b=[1,"x"]&c={"k":[]}', {"options": {"a": "1", "b": [1, "x"], "c": {"k": []}}}),
        ("cpu?a=b=c?d", {"options": {"a": "b=c?d"}}),
        ("cpu?a=50%25%26%2C%3d", {"options": {"a": "50%&,="}}),
        ("cpu?a%3Db=1", {"options": {"a=b": 1}}),
        ("cpu?option.threads=4&threads=1", {"options": {"threads": 4}, "threads": 1}),
        ("cpu?option.env.A=1&session.load=x", {"options": {"env.A": 1, "session.load": "x"}}),
        ("cpu?num_threads=4&gpu_mem_limit=9", {"options": {"num_threads": 4, "gpu_mem_limit": 9}}),
        ("cpu?a=gr%C3%BCn&b=grün", {"options": {"a": "grün", "b": "grün"}}),
    ],
)
def test_what_an_entry_says(text, expected):
    assert arguments(text) == {"kind": "cpu", **expected}


def test_a_kind_may_be_written_in_escapes():
    assert arguments("a%3Fb%2C%25.py:Mine?x=1")["kind"] == "a?b,%.py:Mine"


@pytest.mark.parametrize(
    ("text", "position", "word"),
    [
        ("?threads=1", 1, "kind"),
        ("cpu?", 5, "key=value"),
        ("cpu?threads", 5, "'threads'"),
        ("cpu?a=1&", 9, "key=value"),
        ("cpu?a=1&&b=2", 9, "key=value"),
        ("cpu?=1", 5, "key=value"),
        ("cpu?a=1&a=2", 9, "a once"),
        ("cpu?threads=1&threads=2", 15, "threads once"),
        ("cpu?requird=false", 5, "required; an option 'requird' of the provider is option.requird"),
        ("cpu?thread=1", 5, "threads"),
        ("cpu?x=1&Options.a=1", 9, "option.a"),
        ("cpu?kind=null", 5, "option.kind"),
        ("cpu?env=A", 5, "env.NAME"),
        ("cpu?env.=A", 5, "env.NAME"),
        ("cpu?a=5%", 8, "%25"),
        ("c%zzu", 2, "%25"),
        ("cpu?cpus=3-0", 10, "0-3"),
        ("cpu?cpus=0-99999999", 10, "cores"),
        ("cpu?memory_limit=2XB", 18, "GiB"),
        ("cpu?wrap=gdb '", 10, "quotes"),
        ("cpu?memory_limit=" + "9" * 400 + ".5GiB", 18, "GiB"),
        ("cpu?a=" + "[" * 100_000, 7, "nested"),
        ("cpu?a=[1,", 7, "JSON"),
        ("cpu?a=[NaN]", 7, "JSON"),
        ("cpu?wrap=[gdb]", 10, "JSON"),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(text, position, word):
    with pytest.raises(InvalidOptionError) as caught:
        arguments(text)
    assert f"at character {position}:" in str(caught.value)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("cpu", ["cpu"]),
        (" cpu , null,", ["cpu", "null", ""]),
        ("a?x=[1,2]&y=3,b", ["a?x=[1,2]&y=3", "b"]),
        ('a?x={"k":"],}"},b?y="c,\\",d",c', ['a?x={"k":"],}"}', 'b?y="c,\\",d"', "c"]),
        ("a?x=y=[1,b]", ["a?x=y=[1", "b]"]),
        ("a?cpus=0%2C1,b", ["a?cpus=0%2C1", "b"]),
        ("[a,b]", ["[a", "b]"]),
    ],
)
def test_a_list_is_divided_at_its_commas(text, entries):
    assert split_entries(text) == entries


def test_a_bracket_that_is_not_closed_is_refused():
    with pytest.raises(InvalidOptionError, match=r"character 9.*\] that closes"):
        split_entries("cpu,a?x=[1,null")


def test_a_comma_within_a_value_is_explained():
    with pytest.raises(UnknownProviderError, match="%2C"):
        parse_list("cpu?cpus=0,1")
    with pytest.raises(UnknownProviderError) as caught:
        parse_list("cpu,cpuu")
    assert "%2C" not in str(caught.value)


def test_fields_and_options_reach_the_spec():
    spec = parse_provider("cpu:1?name=fast&threads=2&env.A=b&required=false&compiled=false")
    assert spec == ProviderSpec(
        "cpu:1", name="fast", threads=2, env={"A": "b"}, required=False, options={"compiled": False}
    )
    assert parse_provider("CPUExecutionProvider?threads=1").display == "cpu"
    spec = parse_provider(("XyzExecutionProvider?threads=1", {"device_id": 1, "mode": "HIGH"}))
    assert (spec.kind, spec.display) == ("ort:XyzExecutionProvider", "ort:XyzExecutionProvider")
    assert spec.options == {"device_id": 1, "mode": "HIGH"}
    with pytest.raises(InvalidOptionError, match="one place only"):
        parse_provider(("cpu?a=1", {"b": 2}))
    with pytest.raises(InvalidOptionError, match="one place only"):
        parse_providers(["cpu?a=1"], [{"b": 2}])


def test_the_field_is_checked_as_ever():
    for text, word in [("cpu?threads=0", "threads"), ("cpu?threads=two", "threads"), ("cpu?required=true", "required")]:
        with pytest.raises(InvalidOptionError, match=word):
            parse_provider(text)


def test_a_spec_takes_no_query_in_its_kind():
    with pytest.raises(InvalidOptionError, match="other fields"):
        parse_provider(ProviderSpec("cpu?threads=1"))
    with pytest.raises(InvalidOptionError, match="other fields"):
        parse_provider(ProviderSpec("a.b:Mine?threads=1"))


def test_two_of_one_name_are_told_apart():
    with pytest.raises(InvalidOptionError, match=r"'cpu:1'.*name=NAME"):
        parse_providers(["cpu?threads=1", "cpu"])
    names = [spec.display for spec in parse_providers(["cpu?name=a", "cpu?name=b", "cpu", "cpu:1?threads=1"])]
    assert names == ["a", "b", "cpu", "cpu:1"]


def test_the_environment_stands_in_for_none(monkeypatch):
    monkeypatch.setenv("OUTRIDER_PROVIDERS", "null?required=false, cpu?threads=1")
    null, cpu = parse_providers(None)
    assert (null.display, null.required, cpu.display, cpu.threads) == ("null", False, "cpu", 1)
    assert [spec.display for spec in parse_providers(["cpu:1"])] == ["cpu:1"]
    assert parse_providers(None, [{}, {"a": 1}])[1].options == {"a": 1}
    for text in ("cpuu", "cpu?threads", "cpu,cpu", "cpu,"):
        monkeypatch.setenv("OUTRIDER_PROVIDERS", text)
        with pytest.raises((InvalidOptionError, UnknownProviderError), match="OUTRIDER_PROVIDERS: "):
            parse_providers(None)
    monkeypatch.setenv("OUTRIDER_PROVIDERS", " ")
    assert [spec.display for spec in parse_providers(None)] == ["cpu"]


# Written and read again -----------------------------------------------------------------------------------------------

TEXTS = st.text(max_size=12) | st.text("%&=,?[]{}\"'\\ 01.e-+truefalsn\n", max_size=8)
NAMES = TEXTS.filter(str.strip)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(TEXTS, some, max_size=3),
    max_leaves=6,
)  # fmt: skip
KEYS = TEXTS | st.sampled_from([*FIELDS, "kind", "env", "options", "option.x", "env.A", "cpu", "thread", "a.b"])
CORES = sorted(os.sched_getaffinity(0))
SPECS = st.builds(
    ProviderSpec,
    st.sampled_from(["cpu", "cpu:1", "ort:Some", "ort", "pack.age:Mine:2"]),
    name=st.none() | NAMES,
    env=st.dictionaries(NAMES, TEXTS, max_size=2),
    threads=st.none() | st.integers(1, 64),
    cpus=st.none() | st.lists(st.sampled_from(CORES), min_size=1),
    nice=st.none() | st.integers(-20, 19),
    memory_limit=st.none() | st.integers(1 << 40, 1 << 50),
    required=st.sampled_from(["start", False]),
    options=st.dictionaries(KEYS, VALUES, max_size=4),
    debug=st.booleans(),
    wrap=st.lists(TEXTS.filter(bool), max_size=3),
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(SPECS, min_size=1, max_size=3))
def test_what_is_written_is_read_as_the_same(specs):
    specs = [parse_provider(spec) for spec in specs]
    texts = [str(spec) for spec in specs]
    assert [parse_provider(text) for text in texts] == specs
    assert split_entries(",".join(texts)) == texts
    assert all(text.isprintable() and " " not in text for text in texts)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(TEXTS)
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(InvalidOptionError):
        assert len(split_entries(text)) <= 1 + text.count(",")
    try:
        found = arguments(text)
    except InvalidOptionError:
        return
    assert found["kind"].strip()
    assert arguments(written(found)) == found


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.text("%aZ09-._~&=,?", max_size=12))
def test_escapes_are_those_of_urls(text):
    assert arguments(f"cpu?name={urllib.parse.quote(text)}")["name"] == text


@settings(deadline=None, derandomize=True, max_examples=100)
@given(VALUES)
def test_values_are_those_of_json(value):
    text = urllib.parse.quote(json.dumps(value))
    assert arguments(f"cpu?a={text}")["options"]["a"] == value


def test_what_no_text_can_say_is_shown_as_python():
    for value in (b"bytes", math.nan, math.inf, [b""]):
        spec = ProviderSpec("cpu", options={"a": value})
        assert str(spec) == repr(spec)


# Files ----------------------------------------------------------------------------------------------------------------

FILE = """
[[provider]]
kind = "mine.py:Mine"
python = "venv"
threads = 2
memory_limit = "2GiB"
cpus = "0"
required = false
env = { A = "1" }
wrap = "nice -n 5"
[provider.options]
library = "/x/libep.so"
sizes = [1, 2]

[[provider]]
kind = "cpu:0"
name = "rest"
"""


def test_a_file_lists_providers(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    (tmp_path / "mine.py").write_text("")
    path = tmp_path / "spec.toml"
    path.write_text(FILE)
    mine, rest = read_providers(path)
    assert mine.kind == f"{tmp_path}/mine.py:Mine" and mine.display == "mine.py:Mine"
    assert (mine.threads, mine.memory_limit, mine.cpus, mine.required) == (2, 2 << 30, [0], False)
    assert mine.python == f"{tmp_path}/venv"
    assert (dict(mine.env), mine.wrap) == ({"A": "1"}, ["nice", "-n", "5"])
    assert mine.options == {"library": "/x/libep.so", "sizes": [1, 2]}
    assert (rest.kind, rest.display) == ("cpu", "rest")


@pytest.mark.parametrize(
    ("text", "error", "word"),
    [
        ("", InvalidOptionError, r"\[\[provider\]\]"),
        ("provider = 3", InvalidOptionError, r"\[\[provider\]\]"),
        ("[[providers]]\nkind = 'cpu'", UnknownOptionError, "Did you mean provider"),
        ("[[provider]]\nkind = 'cpu'\n[[provider]]\nkind='null'\nthread = 1", UnknownOptionError, "number 2.*threads"),
        ("[[provider]]\nthreads = 1", InvalidOptionError, "kind"),
        ("[[provider]]\nkind = 'cpuu'", UnknownProviderError, "number 1.*cpu"),
        ("[[provider]]\nkind = 'cpu?threads=1'", InvalidOptionError, "other fields"),
        ("[[provider]]\nkind = 'cpu'\nmemory_limit = '2XB'", InvalidOptionError, "GiB"),
        ("[[provider]]\nkind = 'cpu'\nthreads = 0", InvalidOptionError, "threads=0"),
        ("[[provider]]\nkind = 'cpu'\n[provider.options]\na = 1979-05-27", InvalidOptionError, "plain data"),
        ("[[provider]]\nkind = 'cpu'\n[[provider]]\nkind = 'cpu:0'", InvalidOptionError, "different names"),
        ("[[provider]\nkind", InvalidOptionError, "no TOML.*line 1"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, text, error, word):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(error, match=f"(?s){path}.*{word}"):
        read_providers(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidOptionError, match=r"none\.toml cannot be read: No such file"):
        read_providers(tmp_path / "none.toml")
