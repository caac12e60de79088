"""The driver's description of the first GPU, and which GPUs the runtime can use."""

import ctypes
from importlib import metadata

import pytest

from service.core import cuda
from service.core.cuda import Gpu, check_gpu, find_gpu, has_gpu
from service.core.device_kind import NoDeviceError
from tests.service.fakes import FakeDriver

H100 = Gpu("NVIDIA H100", (9, 0), 80 * 2**30, (13, 0))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", {cuda.DRIVER: made}.__getitem__)
    monkeypatch.setattr(metadata, "version", {cuda.DISTRIBUTION: "1.31.1"}.__getitem__)
    return made


@pytest.mark.usefixtures("driver")
def test_gpu():
    """Name, compute capability, memory and the driver's CUDA version are read from the driver."""
    assert find_gpu() == H100


def test_driver_is_missing(monkeypatch):
    """Without a driver the missing library is named."""

    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(NoDeviceError, match=r"a library is missing: libcuda\.so\.1"):
        find_gpu()


@pytest.mark.parametrize(
    ("card", "capability", "usable"),
    [
        ("V100", (7, 0), False),
        ("T4", (7, 5), True),
        ("A100", (8, 0), True),
        ("A10", (8, 6), True),
        ("Jetson Orin", (8, 7), True),
        ("L4", (8, 9), True),
        ("H200", (9, 0), True),
        ("B200", (10, 0), False),
        ("GB300", (10, 3), False),
        ("RTX 5090", (12, 0), True),
    ],
)
def test_cards(card, capability, usable):
    """The runtime has code for these cards; code of one minor version runs on later ones of its major version."""
    gpu = Gpu(f"NVIDIA {card}", capability, 2**34, (13, 0))
    if usable:
        check_gpu(gpu, "1.31.1")
        return
    with pytest.raises(NoDeviceError, match=rf"^NVIDIA {card} has .*\(provider = cpu\)$"):
        check_gpu(gpu, "1.31.1")


def test_code_of_another_release_is_not_guessed():
    """A runtime whose code is not listed is tried on any card."""
    check_gpu(Gpu("NVIDIA B200", (10, 0), 2**37, (13, 0)), "1.40.0")


@pytest.mark.parametrize(
    ("cuda_major", "supported", "reason"),
    [
        (13, (13, 2), ""),
        (13, (12, 9), "supports CUDA 12.9, .* needs CUDA 13: install NVIDIA driver 580 or newer"),
        (12, (12, 2), ""),
        (12, (11, 8), "needs CUDA 12: install NVIDIA driver 525 or newer"),
        (14, (13, 0), "needs CUDA 14: install a newer NVIDIA driver"),
    ],
)
def test_drivers(cuda_major, supported, reason):
    """A driver has to support the CUDA version that the runtime was built for, or any later one."""
    gpu = Gpu("NVIDIA H100", (9, 0), 2**36, supported)
    if not reason:
        check_gpu(gpu, "1.31.1", cuda_major)
        return
    with pytest.raises(NoDeviceError, match=reason):
        check_gpu(gpu, "1.31.1", cuda_major)


def test_has_gpu(driver):
    """There is a GPU where the GPU build of the runtime is installed and can use the card."""
    assert has_gpu()
    driver.capability = (7, 0)
    assert not has_gpu()


@pytest.mark.usefixtures("driver")
def test_no_gpu_build(monkeypatch):
    """The CPU build of ONNX Runtime finds no GPU, independent of the driver."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert not has_gpu()
