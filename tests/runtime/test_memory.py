"""How much memory there is, read from made-up machines: folder trees as Linux shows them, and what macOS prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeflux import ArgumentError
from moeflux.machine.memory import available, free_pages, huge_pages_unasked, resident
from moeflux.sizes import parse_size

MIB = 1 << 20
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "24 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:12 - cgroup cgroup rw,memory"


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine with 1000 MiB free, and these files."""
    for name, text in ({"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:  {1000 * 1024} kB\n"} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(root: Path, own: str, groups: dict[str, dict[str, str]], mount: str = V2) -> Path:
    """Groups by their path below the mount."""
    files = {"proc/self/mountinfo": f"22 1 8:1 / / rw - ext4 /dev/sda rw\n{mount}\n", "proc/self/cgroup": f"0::{own}\n"}
    place = mount.split()[4].replace("\\040", " ")
    for group, content in groups.items():
        files |= {f"{place}/{group}/{name}".lstrip("/"): text for name, text in content.items()}
    return machine(root, files)


def v1(root: Path, own: str, groups: dict[str, dict[str, str]], mount: str = V1) -> Path:
    files = {"proc/self/mountinfo": f"{mount}\n", "proc/self/cgroup": f"11:cpu,cpuacct:/else\n4:memory:{own}\n"}
    for group, content in groups.items():
        files |= {f"{mount.split()[4]}/{group}/{name}".lstrip("/"): text for name, text in content.items()}
    return machine(root, files)


def used(now: int, cache: int = 0) -> dict[str, str]:
    """A group of the second version with so many MiB in use, so many of them page cache."""
    stat = f"anon {(now - cache) * MIB}\ninactive_file {cache * MIB - 4096}\nactive_file 4096\nshmem 0\n"
    return {"memory.current": f"{now * MIB}\n", "memory.stat": stat}


# ---- What is free -----------------------------------------------------------------------------------------------


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    found = available(machine(tmp_path, {}))
    assert found.bytes == 1000 * MIB
    assert found.source == "free on this machine"


def test_without_proc_something_is_still_said(tmp_path: Path) -> None:
    assert available(tmp_path).bytes > 0


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    found = available(v2(tmp_path, "/user/app", {"user/app": {"memory.max": "max\n"} | used(700)}))
    assert found.source == "free on this machine"


@pytest.mark.parametrize(("cache", "free"), [(0, 100), (150, 250), (200, 300)])
def test_the_second_version(tmp_path: Path, cache: int, free: int) -> None:
    """The page cache in use is given back when the room is wanted."""
    root = v2(tmp_path, "/user/app", {"user/app": {"memory.max": f"{300 * MIB}\n"} | used(200, cache)})
    found = available(root)
    assert found.bytes == free * MIB
    assert found.source == "free below the limit of control group /user/app"


def test_the_nearest_limit_of_nested_groups_counts(tmp_path: Path) -> None:
    groups = {
        "a/b/c": {"memory.max": "max"} | used(100),
        "a/b": {"memory.max": str(900 * MIB)} | used(100),
        "a": {"memory.max": str(2000 * MIB)} | used(1500),  # its other children use the rest
    }
    assert available(v2(tmp_path, "/a/b/c", groups)).bytes == 500 * MIB
    assert available(v2(tmp_path, "/a/b/c", groups)).source.endswith("/a")


def test_where_reclaim_begins_is_a_limit_too(tmp_path: Path) -> None:
    group = {"memory.max": str(900 * MIB), "memory.high": str(400 * MIB)} | used(100)
    assert available(v2(tmp_path, "/app", {"app": group})).bytes == 300 * MIB


def test_more_used_than_allowed_is_nothing_free(tmp_path: Path) -> None:
    assert available(v2(tmp_path, "/app", {"app": {"memory.max": str(100 * MIB)} | used(150)})).bytes == 0


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """Without a namespace of its own, its path begins where the mount does; with one, it is just /."""
    limited = {"memory.max": str(300 * MIB)} | used(100)
    mount = "30 23 0:26 /docker/1234 /sys/fs/cgroup ro - cgroup2 cgroup rw"
    for place, (own, way) in enumerate((("/docker/1234", ""), ("/docker/1234/job", "job"), ("/", ""), ("/../x", ""))):
        root = v2(tmp_path / str(place), own, {way: limited}, mount)
        assert available(root).bytes == 200 * MIB, own


def test_a_mount_with_a_space(tmp_path: Path) -> None:
    mount = "30 23 0:26 / /my\\040groups rw - cgroup2 cgroup rw"
    assert available(v2(tmp_path, "/a", {"a": {"memory.max": str(5 * MIB)}}, mount)).bytes == 5 * MIB


def test_the_first_version(tmp_path: Path) -> None:
    limited = {
        "memory.limit_in_bytes": f"{600 * MIB}\n",
        "memory.usage_in_bytes": f"{500 * MIB}\n",
        # Its own page cache is smaller than that of all groups below it.
        "memory.stat": f"inactive_file 0\ntotal_inactive_file {100 * MIB}\ntotal_active_file {50 * MIB}\n",
    }
    unlimited = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5"}
    found = available(v1(tmp_path, "/job/step", {"job/step": unlimited, "job": limited, "": unlimited}))
    assert found.bytes == 250 * MIB
    assert found.source.endswith("control group /job")


@pytest.mark.parametrize("damage", ["a folder", "no number", "gone"])
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, damage: str) -> None:
    root = v2(tmp_path, "/a", {"a": {"memory.max": str(5 * MIB)} | used(1)})
    file = root / "sys/fs/cgroup/a/memory.max"
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage == "no number":
        file.write_text("lots\n")
    assert available(root).source == "free on this machine"


def test_a_group_that_does_not_say_what_is_cached(tmp_path: Path) -> None:
    group = {"memory.max": str(300 * MIB), "memory.current": str(100 * MIB), "memory.stat": "nonsense\n"}
    assert available(v2(tmp_path, "/a", {"a": group})).bytes == 200 * MIB


@pytest.mark.parametrize("text", ["", "\n", "30 23 0:26 /\n", "a - b\n", "x\n- cgroup2 cgroup rw\n"])
def test_odd_lists_of_mounts(tmp_path: Path, text: str) -> None:
    root = machine(tmp_path, {"proc/self/mountinfo": text, "proc/self/cgroup": "0::/a\nodd\n"})
    assert available(root).source == "free on this machine"


def test_what_macos_prints() -> None:
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:   100.\nPages active:  900.\n"
        "Pages inactive:  20.\nPages speculative:  3.\nPages purgeable:  1.\nPages wired down:  500.\n"
    )
    assert free_pages(text) == 124 * 16384
    assert free_pages("") is None


# ---- This process -----------------------------------------------------------------------------------------------


def test_what_this_process_holds(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/self/status": "Name:\tx\nVmHWM:\t  90 kB\nVmRSS:\t  80 kB\nRssAnon:\t  50 kB\n"})
    found = resident(root)
    assert (found.now, found.peak, found.anonymous) == (80 * 1024, 90 * 1024, 50 * 1024)


def test_it_is_really_this_process() -> None:
    before = resident()
    assert 1 << 20 < before.anonymous <= before.now <= before.peak
    block = bytearray(os.urandom(1)) * (64 * MIB)
    assert resident().now > before.now + 32 * MIB
    assert resident().peak >= resident().now
    del block


def test_without_proc_the_system_is_asked(tmp_path: Path) -> None:
    found = resident(tmp_path)
    assert 1 << 20 < found.now <= found.peak


@pytest.mark.parametrize(("text", "answer"), [("[always] madvise never\n", True), ("always [madvise] never\n", False)])
def test_huge_pages(tmp_path: Path, text: str, answer: bool) -> None:
    assert huge_pages_unasked(machine(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})) is answer


def test_no_word_of_huge_pages(tmp_path: Path) -> None:
    assert huge_pages_unasked(tmp_path) is False


# ---- Sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("8g", 8 * 10**9),
        ("8GiB", 8 << 30),
        ("1.5 MiB", 3 << 19),
        ("0.5k", 500),
        (" 123 ", 123),
        ("77B", 77),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size("memory", text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1e9", "8 bits", "8iB", "8PB", "0", "nan", 0, -5, 1.5, True, None, [1], "9" * 30, 1 << 70]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ArgumentError, match='memory: expected bytes, or a size as "8GB" or "8GiB", found'):
        parse_size("memory", text)
