"""OpenVINO on the CPU as a kind of device: fp32 graphs in fp32, or in bf16 where the processor has units for it."""

import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from service.core import cpu
from service.core.device_kind import DeviceKind, NoDeviceError, ReducedPrecision

PACKAGE = "openvino"
# A package that openvino imports if it can, and that reports the import.
TELEMETRY = "openvino_telemetry"
# Compiled kernels that a stream keeps. Nearly every batch has another shape, and OpenVINO keeps 5,000, which take
# gigabytes.
KERNELS = 200
# Of a processor that multiplies bf16, as Linux names them.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
CPUINFO = Path("/proc/cpuinfo")


@cache
def load_runtime() -> ModuleType:
    """Import openvino without its telemetry, which it takes for not installed. Raises NoDeviceError without openvino.

    A telemetry package that another part of this process has imported stays as it is.
    """
    hidden = TELEMETRY not in sys.modules
    if hidden:
        sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        install = 'pip install "quartet-serving[openvino]"'
        raise NoDeviceError(f"openvino cannot be imported ({error}): {install}") from None
    finally:
        if hidden:
            del sys.modules[TELEMETRY]


def find_processor(_: ModuleType) -> str:
    """Return OpenVINO's name of the processor. Raises NoDeviceError without openvino."""
    name: str = load_runtime().Core().get_property("CPU", "FULL_DEVICE_NAME")
    return name


def bf16_problem() -> str | None:
    """Return why bf16 is not computed on this processor; None where the processor multiplies bf16.

    OpenVINO also computes bf16 on processors that convert each number to fp32, where fp32 is faster.
    """
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    if any(BF16_FLAGS & {*line.split()} for line in lines if line.startswith("flags")):
        return None
    return f"this processor has none of the features {' and '.join(sorted(BF16_FLAGS))}: set precision fp32"


class CompiledGraph:
    """A compiled model with the interface of an `onnxruntime.InferenceSession`.

    Several threads may call `run` at the same time. Each run takes an infer request that no other run uses.
    """

    def __init__(self, graph: Path | bytes, threads: int, runs: int, precision: str) -> None:
        runtime = load_runtime()
        # By name, because a file's contents could otherwise select another format than ONNX.
        frontend = runtime.frontend.FrontEndManager().load_by_framework("onnx")
        model = frontend.convert(
            frontend.load(io.BytesIO(graph) if isinstance(graph, bytes) else str(graph))
        )
        options = {
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
            "INFERENCE_NUM_THREADS": threads * runs,
            "NUM_STREAMS": runs,
            # Sessions share the cores, and each would pin its threads to the same ones.
            "ENABLE_CPU_PINNING": False,
            "CPU_RUNTIME_CACHE_CAPACITY": KERNELS,
        }
        self._model = runtime.Core().compile_model(model, "CPU", options)
        self._idle: list[Any] = []

    def get_inputs(self) -> list[SimpleNamespace]:
        return _describe(self._model.inputs)

    def get_outputs(self) -> list[SimpleNamespace]:
        return _describe(self._model.outputs)

    def run(
        self, outputs: Sequence[str] | None, feeds: Mapping[str, Any], options: Any = None
    ) -> list[Any]:
        """Compute outputs. options: ONNX Runtime's, of which a run that begins respects `terminate`"""
        if options is not None and options.terminate:
            raise RuntimeError("the run was ended before it began")
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._model.create_infer_request()
        found = request.infer(feeds, share_inputs=True)  # copies of the outputs
        self._idle.append(request)
        names = [one.name for one in self.get_outputs()] if outputs is None else outputs
        return [found[name] for name in names]


def _describe(ports: Sequence[Any]) -> list[SimpleNamespace]:
    """Return the names and types of inputs or outputs as ONNX Runtime does."""
    types = {"f32": "float", "f16": "float16", "f64": "double"}
    return [
        SimpleNamespace(name=name, type=f"tensor({types.get(kind, kind)})")
        for port in ports
        for kind in [port.get_element_type().get_type_name()]
        for name in port.get_names()
    ]


OPENVINO = DeviceKind(
    name="openvino",
    provider="OpenVINO",
    label="the CPU with OpenVINO",
    graphs=("openvino", "any"),
    batch_tokens=cpu.CPU.batch_tokens,
    batch_size=cpu.CPU.batch_size,
    slots=cpu.slots,
    http_workers=cpu.CPU.http_workers,
    precisions=("fp32",),
    row_multiple=8,
    reduced={"bf16": ReducedPrecision("fp32", 0.999, bf16_problem)},
    package=PACKAGE,
    find=find_processor,
    open=CompiledGraph,
)
