"""Generate the messages of the Open Inference Protocol from their description.

`python -m tests.protobuf` writes service/api/dialects/open_inference_pb2.py; it needs grpcio-tools.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROTO = ROOT / "service/api/dialects/open_inference.proto"
MODULE = PROTO.with_name("open_inference_pb2.py")


def generate() -> str:
    """Return the module that protoc generates."""
    with tempfile.TemporaryDirectory() as folder:
        name = PROTO.relative_to(ROOT)
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--python_out={folder}"]
        subprocess.run([*command, str(name)], check=True)
        return (Path(folder) / name.with_name(MODULE.name)).read_text(encoding="utf-8")


if __name__ == "__main__":
    MODULE.write_text(generate(), encoding="utf-8")
