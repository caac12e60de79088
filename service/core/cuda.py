"""The first NVIDIA GPU that is visible, as its driver describes it.

Only the driver is queried: no CUDA library is loaded and no memory of the device is allocated.
"""

import ctypes
from dataclasses import dataclass
from importlib import metadata
from typing import Any

DRIVER = "libcuda.so.1"
DISTRIBUTION = "onnxruntime-gpu"
CUDA_MAJOR = 13  # of the pinned runtime, where the runtime does not report its own
LEAST_DRIVERS = {12: 525, 13: 580}  # NVIDIA's oldest driver branch by the major version of CUDA
# Compute capabilities for which a release of onnxruntime-gpu contains machine code. It contains no PTX, so the driver
# compiles nothing for another one. A release that is not listed here is tried instead.
CODE = {"1.31": ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0))}

# Attributes of cuDeviceGetAttribute.
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76


class NoGpuError(Exception):
    """No GPU that the runtime can use; the message contains the reason and what to do."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    capability: its compute capability, major and minor
    memory: bytes
    cuda: the newest CUDA version that the driver supports, major and minor
    """

    name: str
    capability: tuple[int, int]
    memory: int
    cuda: tuple[int, int]


def find_gpu() -> Gpu:
    """Query the first visible device. Raises NoGpuError where the driver or the device is missing."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise NoGpuError(f"a library is missing: {error}") from None
    number = ctypes.c_int()
    _call(driver, "cuDriverGetVersion", ctypes.byref(number))
    cuda = number.value // 1000, number.value % 1000 // 10
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGetCount", ctypes.byref(number))
    if not number.value:
        raise NoGpuError("the NVIDIA driver has no visible GPU; check CUDA_VISIBLE_DEVICES")
    device = ctypes.c_int()
    _call(driver, "cuDeviceGet", ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(256)
    _call(driver, "cuDeviceGetName", name, len(name), device)
    capability = []
    for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR):
        _call(driver, "cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
        capability.append(number.value)
    memory = ctypes.c_size_t()
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major, minor = capability
    return Gpu(name.value.decode(errors="replace"), (major, minor), memory.value, cuda)


def _call(driver: Any, function: str, *arguments: Any) -> None:
    status = getattr(driver, function)(*arguments)
    if status:
        text = ctypes.c_char_p()
        unknown = driver.cuGetErrorString(status, ctypes.byref(text)) or not text.value
        reason = "unknown error" if unknown else (text.value or b"").decode(errors="replace")
        raise NoGpuError(f"the NVIDIA driver failed: {function} returned {status}, {reason}")


def check_gpu(gpu: Gpu, runtime: str, cuda_major: int = CUDA_MAJOR) -> None:
    """Raise NoGpuError for a driver that is too old, and for a card for which the runtime contains no code.

    runtime: version of onnxruntime-gpu; cuda_major: major version of the CUDA that it was built for
    """
    if gpu.cuda < (cuda_major, 0):
        least = LEAST_DRIVERS.get(cuda_major)
        action = f"NVIDIA driver {least} or newer" if least else "a newer NVIDIA driver"
        raise NoGpuError(
            f"the NVIDIA driver supports CUDA {_dotted(gpu.cuda)}, and onnxruntime-gpu {runtime} needs"
            f" CUDA {cuda_major}: install {action}"
        )
    code = CODE.get(runtime.rpartition(".")[0])
    if code is None:
        return
    major, minor = gpu.capability
    if not any(major == own and minor >= least for own, least in code):
        listed = ", ".join(map(_dotted, code))
        raise NoGpuError(
            f"{gpu.name} has compute capability {_dotted(gpu.capability)}, and onnxruntime-gpu {runtime} has code for"
            f" {listed} only: use another card, or the CPU (provider = cpu)"
        )


def has_gpu() -> bool:
    """Return whether the GPU build of the runtime is installed and the driver reports a GPU for which it has code.

    This function does not import the runtime, so that a process without inference can call it.
    """
    try:
        check_gpu(find_gpu(), metadata.version(DISTRIBUTION))
    except (NoGpuError, metadata.PackageNotFoundError):
        return False
    return True


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
