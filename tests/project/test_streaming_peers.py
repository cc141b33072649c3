"""streaming.py of bench/peers: which figure is the fair one, and that a disk has its setting back. Nothing is
measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

PEERS = Path(__file__).resolve().parents[2] / "bench" / "peers"


@pytest.fixture(scope="module")
def streaming() -> ModuleType:
    if not PEERS.is_dir():
        pytest.skip("the sources are not here")
    sys.path.insert(0, str(PEERS))
    import streaming

    return streaming


def made_up(tmp_path: Path, *, partition: bool) -> tuple[Path, Path]:
    """A file, and as much of /sys as leads from it to the setting of its disk, which is returned too."""
    file = tmp_path / "model"
    file.touch()
    device = file.stat().st_dev
    disk = tmp_path / "sys" / "devices" / "vda"
    setting = disk / "queue" / "read_ahead_kb"
    setting.parent.mkdir(parents=True)
    setting.write_text("8192\n")
    link = tmp_path / "sys" / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    (disk / "vda1").mkdir()
    link.symlink_to(disk / "vda1" if partition else disk)
    return file, setting


@pytest.mark.parametrize("partition", [False, True])
def test_a_disk_has_its_setting_back(streaming: ModuleType, tmp_path: Path, partition: bool) -> None:
    file, setting = made_up(tmp_path, partition=partition)
    read_ahead = streaming.ReadAhead(file, tmp_path / "sys")
    assert read_ahead.own == 8192
    with pytest.raises(KeyboardInterrupt), read_ahead.of(128):
        assert setting.read_text() == "128"
        raise KeyboardInterrupt
    assert setting.read_text() == "8192"


def test_what_lies_on_no_disk_is_refused(streaming: ModuleType, tmp_path: Path) -> None:
    file, setting = made_up(tmp_path, partition=False)
    setting.unlink()
    with pytest.raises(SystemExit, match="model: no disk with a read-ahead was found below it"):
        streaming.ReadAhead(file, tmp_path / "sys")


def test_the_fair_figure_is_of_what_suits_the_others_best(streaming: ModuleType) -> None:
    speeds = {
        (128, "moeflux"): (270, 29.4), (128, "llama.cpp"): (62, 6.0), (128, "llama.cpp, sleeping"): (63, 6.4),
        (8192, "moeflux"): (264, 20.0), (8192, "llama.cpp"): (62.6, 0.52), (8192, "llama.cpp, sleeping"): (63.2, 0.56),
    }  # fmt: skip
    samples = {name: [streaming.Sample(*speed, None)] for name, speed in speeds.items()}
    lines = streaming.report(samples)
    assert lines[1] == (
        "128 kB: decode, median tok/s: moeflux 29.40, llama.cpp 6.00, llama.cpp, sleeping 6.40; ratio 4.59"
    )
    assert lines[3].startswith("8192 kB: decode") and lines[3].endswith("ratio 35.71")
    assert lines[4:] == ["fair: prefill 4.18 (8192 kB)", "fair: decode 4.59 (128 kB)"]
