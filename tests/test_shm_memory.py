"""What may be populated: limits of memory cgroups as files, and the typed refusal."""

import os

import pytest

from outrider.shm import memory
from outrider.shm.errors import OutOfMemoryError

pytestmark = pytest.mark.fast
MOST = 1 << 50


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def least(membership, root):
    left = MOST
    for group in memory.memory_groups(membership, root):
        left = group.available(left)
    return left


def test_version_2_counts_every_group_up_to_the_root(tmp_path):
    write(tmp_path / "a" / "b", memory__max="max\n", memory__current="5000\n")
    write(tmp_path / "a", memory__max="9000\n", memory__current="6000\n", memory__stat="anon 1\ninactive_file 500\n")
    assert least("0::/a/b\n", tmp_path) == 9000 - 6000 + 500
    write(tmp_path / "a" / "b", memory__max="5100\n")
    assert least("0::/a/b\n", tmp_path) == 100


def test_version_1_and_hybrid_hierarchies(tmp_path):
    write(
        tmp_path / "memory" / "job",
        memory__limit_in_bytes="7000",
        memory__usage_in_bytes="1000",
        memory__stat="inactive_file 1\ntotal_inactive_file 30\n",
    )
    write(tmp_path / "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="1")
    write(tmp_path / "unified" / "job", memory__max="6500", memory__current="1000")
    assert least("4:memory:/job\n1:cpu:/other\n", tmp_path) == 6030
    assert least("4:cpu,memory:/job\n0::/job\n", tmp_path) == 5500


def test_absent_files_and_invisible_groups_do_not_limit(tmp_path):
    assert least("0::/gone\n4:memory:/gone\n9:name=systemd:/\n", tmp_path) == MOST
    write(tmp_path, memory__max="800", memory__current="100")
    assert least("0::/not/visible/here\n", tmp_path) == 700
    group = memory.memory_groups("0::/\n", tmp_path)[0]
    (tmp_path / "memory.max").unlink()
    assert group.available(MOST) == MOST


def test_refusal_names_value_asked_and_available(tmp_path, monkeypatch):
    write(tmp_path, memory__max=str(memory.RESERVE + 5000), memory__current="1000")
    groups = tuple(memory.memory_groups("0::/\n", tmp_path))
    monkeypatch.setattr(memory, "_own_groups", lambda: groups)
    assert memory.available_bytes() == 4000
    memory.check("edge y", 4000)
    with pytest.raises(MemoryError) as refused:
        memory.check("edge y", 4001)
    error = refused.value
    assert isinstance(error, OutOfMemoryError)
    assert (error.value, error.asked, error.available) == ("edge y", 4001, 4000)
    assert all(word in str(error) for word in ("edge y", "4001", "4000"))


def test_this_machine_has_some_and_not_more_than_it_has():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes() < total
