"""Which GPUs a container can use."""

from pathlib import Path

import pytest

from holdfast.launcher.host.gpus import visible

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 218
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.bc.00.02
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t 0000:{bus}:00.0
Device Minor: \t {minor}
GPU Firmware: \t 580.95.05
GPU Excluded:\t No
"""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A driver that lists two GPUs, and a container that may use the second one."""
    for minor, uuid in enumerate(
        ("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52", "GPU-a8394b51-c086-568a-9f1a-c1e1c934c44c")
    ):
        folder = tmp_path / "proc" / f"0000:0{minor + 1}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION.format(uuid=uuid, bus=f"0{minor + 1}", minor=minor))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia1").touch()
    return tmp_path / "proc"


def test_only_those_with_a_device_file_here_count(proc: Path, tmp_path: Path) -> None:
    assert visible(proc, tmp_path / "dev") == ("GPU-a8394b51-c086-568a-9f1a-c1e1c934c44c",)


def test_without_a_driver_there_are_none(tmp_path: Path) -> None:
    assert visible(tmp_path / "none", tmp_path) == ()


@pytest.mark.parametrize("text", ["", "GPU UUID: GPU-????????-????-????\nDevice Minor: 1\n", "Device Minor: 1\n"])
def test_what_the_driver_does_not_say_yet_is_left_out(proc: Path, tmp_path: Path, text: str) -> None:
    for information in proc.glob("*/information"):
        information.write_text(text)
    assert visible(proc, tmp_path / "dev") == ()
