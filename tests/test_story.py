"""What a death is told like: every fact as a field, every message with what happened, where, why and what to do."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.scheduler.oom import OomKills, oom_kills
from outrider.scheduler.story import PHASES, Facts, attempt, died, hint_of, last_words

pytestmark = pytest.mark.fast

CRASH = Facts(
    "my:Provider", 1, 2, 4711, -11, "run", 3, ("conv1", "relu1"), 2, stack="Fatal Python error", stderr="oh no"
)


def test_a_crash_in_a_run_is_told_with_all_that_is_known() -> None:
    error = died(CRASH)
    assert str(error) == (
        "worker my:Provider (incarnation 2, pid 4711) died while it ran partition 3 (conv1, relu1), after 2 of its "
        "units: it was ended by SIGSEGV. Native code of the provider crashed; ProviderSpec(debug=True, wrap=['gdb', "
        "'--args']) runs it under a debugger.\nIts Python stack:\nFatal Python error\nIts last output:\noh no"
    )
    assert error.fields() == {
        "provider": "my:Provider", "device": 1, "incarnation": 2, "phase": "run", "partition": 3,
        "nodes": ["conv1", "relu1"], "step": 2, "signal": "SIGSEGV", "exit_code": -11, "reason": None,
        "hint": hint_of(CRASH), "stack": "Fatal Python error", "stderr": "oh no", "attempts": [],
    }  # fmt: skip
    assert pickle.loads(pickle.dumps(error)).fields() == error.fields()


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_has_its_words(phase: str) -> None:
    assert f"died {PHASES[phase].format(what='the model')}: it exited with code 3." in str(
        died(Facts("cpu", 0, 1, 7, 3, phase))
    )


def test_what_we_killed_is_told_with_the_reason_and_no_guess() -> None:
    error = died(replace(CRASH, code=-9, reason="it ran longer than its partition_deadline of 2 s."))
    assert "it was ended by SIGKILL, by us: it ran longer than its partition_deadline of 2 s.\n" in str(error)
    assert (error.reason, error.hint) == ("it ran longer than its partition_deadline of 2 s.", None)


def test_earlier_deaths_are_listed_oldest_first_with_the_end_of_their_output() -> None:
    first = attempt(died(replace(CRASH, incarnation=1, stderr="x" * 5000 + "last")))
    second = attempt(died(replace(CRASH, code=-9, reason="it hung")))
    error = died(replace(CRASH, incarnation=3, attempts=[first, second]))
    assert error.attempts == [first, second]
    assert (first["signal"], first["stderr"]) == ("SIGSEGV", "x" * 1996 + "last") and "attempts" not in first
    assert (
        "Before that in this run:\n"
        "  my:Provider (incarnation 1) died in partition 3: it was ended by SIGSEGV\n"
        "  my:Provider (incarnation 2) died in partition 3: it was ended by SIGKILL (it hung)\n"
    ) in str(error)


def test_how_it_ended_means_nothing_when_it_said_why_it_does_not_start() -> None:
    facts = Facts("cpu", 0, 1, 7, 3, "start", stderr="some words")
    assert last_words(facts, said=True) == "Its last output:\nsome words"
    assert last_words(facts).startswith("Something in the process ended it")


def test_a_missing_stack_is_explained_only_where_there_should_be_one() -> None:
    assert "handles that signal itself" in str(died(replace(CRASH, stack="")))
    assert "stack" not in str(died(replace(CRASH, stack="", code=-9)))
    assert "passed through" in str(died(replace(CRASH, stderr="", passed_through=True)))


@pytest.mark.parametrize(
    ("facts", "blames_memory"),
    [
        (replace(CRASH, code=-9), False),  # a SIGKILL alone says nothing
        (replace(CRASH, code=-9, stderr="MemoryError", memory_limit=1 << 30), False),
        (replace(CRASH, code=-9, short="the kernel ended a process because memory was short"), True),
        (replace(CRASH, code=-6, stderr="what():  std::bad_alloc"), False),  # no limit of ours
        (replace(CRASH, code=-6, stderr="what():  std::bad_alloc", memory_limit=1 << 30), True),
        (replace(CRASH, code=1, stderr="Cannot allocate memory", memory_limit=1 << 30), True),
        (replace(CRASH, code=1, stderr="OpenBLAS error: Memory allocation still failed", memory_limit=1 << 30), True),
        (replace(CRASH, code=1, stderr="Unable to allocate 3.7 GiB", memory_limit=1 << 30), True),
        (replace(CRASH, code=-6, stderr="assertion failed", memory_limit=1 << 30), False),
    ],
)
def test_a_lack_of_memory_is_named_only_with_evidence(facts: Facts, blames_memory: bool) -> None:
    hint = hint_of(facts) or ""
    assert hint.startswith("Out of memory: ") == blames_memory
    assert hint in str(died(facts))


V2 = "low 0\nhigh 0\nmax 812\noom 3\noom_kill {}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
VMSTAT = "nr_free_pages 7\noom_kill {}\noom_kill_other 9\n"


@pytest.mark.parametrize("text", [V2, V1, VMSTAT])
def test_the_counter_in_each_kind_of_file(text: str) -> None:
    assert oom_kills(text.format(5)) == 5
    assert oom_kills(text.format("many")) is None


@pytest.mark.parametrize(
    ("cgroup", "counter", "text"),
    [
        ("0::/box\n", "sys/fs/cgroup/box/memory.events", V2),
        ("0::/host/path/of/it\n", "sys/fs/cgroup/memory.events", V2),  # seen from a container
        ("7:memory:/box\n0::/\n", "sys/fs/cgroup/memory/box/memory.oom_control", V1),
        ("0::/\n", "proc/vmstat", VMSTAT),
    ],
)
def test_each_kill_that_the_kernel_counted_explains_one_death(
    tmp_path: Path, cgroup: str, counter: str, text: str
) -> None:
    limit = str(Path(counter).parent / ("memory.limit_in_bytes" if text is V1 else "memory.max"))
    files = {"proc/self/cgroup": cgroup, "proc/vmstat": VMSTAT.format(50), counter: text.format(2)}
    for path, body in {**files, **({} if text is VMSTAT else {limit: "max"})}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(body)
    kills = OomKills(str(tmp_path))
    assert kills.source == tmp_path / counter
    assert kills.explain() is None  # the two are of before
    (tmp_path / counter).write_text(text.format(4))
    assert [bool(kills.explain()) for _ in range(3)] == [True, True, False]
    (tmp_path / counter).unlink()
    assert kills.explain() is None


def test_a_system_that_tells_nothing_explains_nothing(tmp_path: Path) -> None:
    kills = OomKills(str(tmp_path))
    assert (kills.source, kills.explain()) == (None, None)


def test_the_counter_of_this_system_is_found() -> None:
    source = OomKills().source
    assert source is not None
    assert oom_kills(source.read_text()) is not None
