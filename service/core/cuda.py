"""NVIDIA GPUs as a kind of device. The runtime uses the first GPU that is visible."""

import ctypes
import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from service.core.device_kind import DeviceKind, NoDeviceError, shared_slots

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


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU."""

    name: str
    capability: tuple[int, int]  # its compute capability, major and minor
    memory: int  # bytes
    cuda: tuple[int, int]  # the newest CUDA version that the driver supports, major and minor


def open_driver() -> tuple[Any, int]:
    """Return the driver and the number of visible GPUs. Raises NoDeviceError where the driver or a GPU is missing."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise NoDeviceError(f"a library is missing: {error}") from None
    number = ctypes.c_int()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGetCount", ctypes.byref(number))
    if not number.value:
        raise NoDeviceError("the NVIDIA driver has no visible GPU; check CUDA_VISIBLE_DEVICES")
    return driver, number.value


def find_gpu() -> Gpu:
    """Query the driver, which loads no CUDA library. Raises NoDeviceError where the driver or the device is missing."""
    driver, _ = open_driver()
    number = ctypes.c_int()
    _call(driver, "cuDriverGetVersion", ctypes.byref(number))
    cuda = number.value // 1000, number.value % 1000 // 10
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
        raise NoDeviceError(f"the NVIDIA driver failed: {function} returned {status}, {reason}")


def check_gpu(gpu: Gpu, runtime: str, cuda_major: int = CUDA_MAJOR) -> None:
    """Raise NoDeviceError if onnxruntime-gpu `runtime` for CUDA `cuda_major` cannot run on this driver and card."""
    if gpu.cuda < (cuda_major, 0):
        least = LEAST_DRIVERS.get(cuda_major)
        action = f"NVIDIA driver {least} or newer" if least else "a newer NVIDIA driver"
        raise NoDeviceError(
            f"the NVIDIA driver supports CUDA {_dotted(gpu.cuda)}, and onnxruntime-gpu {runtime} needs"
            f" CUDA {cuda_major}: install {action}"
        )
    code = CODE.get(runtime.rpartition(".")[0])
    if code is None:
        return
    major, minor = gpu.capability
    if not any(major == own and minor >= least for own, least in code):
        listed = ", ".join(map(_dotted, code))
        raise NoDeviceError(
            f"{gpu.name} has compute capability {_dotted(gpu.capability)}, and onnxruntime-gpu {runtime} has code for"
            f" {listed} only: use another card, or the CPU (provider = cpu)"
        )


def find_usable_gpu(runtime: ModuleType) -> str:
    """Return the name of the GPU. Raises NoDeviceError with the missing library or why the GPU cannot be used."""
    if hasattr(runtime, "preload_dlls"):
        # The function prints; the loader below names what is missing.
        with redirect_stdout(io.StringIO()):
            runtime.preload_dlls()
    library = Path(str(runtime.__file__)).parent / "capi" / "libonnxruntime_providers_cuda.so"
    built_for = getattr(runtime, "cuda_version", "").partition(".")[0]
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise NoDeviceError(f"a library is missing: {error}") from None
    gpu = find_gpu()
    check_gpu(gpu, runtime.__version__, int(built_for or CUDA_MAJOR))
    return gpu.name


def has_gpu() -> bool:
    """Return whether the runtime's GPU build and a fitting GPU are there, without an import of the runtime."""
    try:
        check_gpu(find_gpu(), metadata.version(DISTRIBUTION))
    except (NoDeviceError, metadata.PackageNotFoundError):
        return False
    return True


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


CUDA = DeviceKind(
    name="cuda",
    provider="CUDAExecutionProvider",
    label="the GPU",
    graphs=("cuda", "any"),
    batch_tokens=16_384,
    batch_size=256,
    # Two, so that one batch is prepared while the other one runs.
    slots=lambda replicas, threads, bundles: shared_slots(replicas or 2, threads),
    # One process encodes texts more slowly than a GPU computes them.
    http_workers=lambda cores: max(min(cores // 2, 4), 1),
    precisions=("fp16", "fp32"),
    # TF32 keeps as few digits as fp16, so fp32 outputs would exceed the tolerance of the goldens. The fused norm of
    # fp16 graphs sums in fp32 in its strict mode only. Otherwise, large sums give a wrong norm without an error.
    options={"use_tf32": "0", "enable_skip_layer_norm_strict_mode": "1"},
    package=DISTRIBUTION,
    find=find_usable_gpu,
    is_present=has_gpu,
    number=lambda: open_driver()[1],
    memory=lambda: find_gpu().memory,
)
