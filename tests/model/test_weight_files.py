"""The weight files of a directory: their order, shards by their index, and what is refused."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model.checkpoints import reader
from model.checkpoints.errors import CheckpointError
from model.checkpoints.hub_names import check_numbers
from model.checkpoints.weight_files import find_weights, read_tensors
from tests.json_files import editing
from tests.model.helpers import TOLERANCE, batch, ours, perturb, real, shape, theirs

PACKED = batch([9, 1, 4])
INDEX = "model.safetensors.index.json"


@pytest.fixture
def peer() -> Any:
    """An encoder of transformers with random weights."""
    return perturb(transformers.BertModel(transformers.BertConfig(**shape().to_dict()))).eval()


@pytest.fixture
def shards(peer: Any, tmp_path: Path) -> Path:
    """The encoder in several safetensors files, as transformers writes them."""
    peer.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len([*(tmp_path / "shards").glob("model-*.safetensors")]) > 2
    return tmp_path / "shards"


def save_pickle(peer: Any, folder: Path, shards: int = 1) -> Path:
    """The encoder in one pickle or in several with an index, as transformers 4 wrote them."""
    peer.config.save_pretrained(folder)
    state = peer.state_dict()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    names = {
        f"pytorch_model-{n + 1:05}-of-{shards:05}.bin": [*state][n::shards] for n in range(shards)
    }
    for file, listed in names.items():
        torch.save({name: state[name] for name in listed}, folder / file)
    weight_map = {name: file for file, listed in names.items() for name in listed}
    document = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(document))
    return folder


@torch.no_grad()
def assert_same_states(peer: Any, folder: Path) -> None:
    expected = real(peer(**theirs(PACKED)).last_hidden_state, PACKED)
    found = reader.load_encoder(folder)(*ours(PACKED))
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_shards(peer, shards):
    """Shards give transformers' hidden states."""
    assert_same_states(transformers.AutoModel.from_pretrained(shards).eval(), shards)


@pytest.mark.parametrize("count", [1, 3])
def test_pickles(count, peer, tmp_path):
    """Pickled tensors, in one file or by their index, give transformers' hidden states."""
    folder = save_pickle(peer, tmp_path, count)
    assert_same_states(transformers.AutoModel.from_pretrained(folder).eval(), folder)


def test_order(tmp_path):
    """One safetensors file comes before shards, and those come before pickles, as in transformers."""
    expected = [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ]
    for name in expected:
        (tmp_path / name).write_text("")
    for name in expected:
        assert name == find_weights(tmp_path).name
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing, and so are"):
        find_weights(tmp_path)


class Attack:
    """A pickle that would run a command."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('this code must not run')",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Attack(), "cannot be read as tensors alone: it has other objects, which could run code"),
        ([torch.ones(2)], "holds a list, not tensors"),
        ({"model": {"weight": torch.ones(2)}}, "'model' is a dict, not a tensor"),
        ({0: torch.ones(2)}, "0 is a Tensor, not a tensor"),
    ],
)
def test_other_pickles(content, message, tmp_path):
    """A pickle of anything but tensors by their names is refused, and no code of it runs."""
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin:? .*{message}"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", pickle.dumps({"a": 1}), b"\x80\x02}q\x00."]
)
def test_broken_pickles(content, tmp_path):
    """A file that is no archive of tensors is refused in one line."""
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^[^\n]*pytorch_model\.bin cannot be read[^\n]*$"):
        read_tensors(tmp_path)


def edit_map(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with editing(folder / INDEX) as document:
        change(document["weight_map"])


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def list_twice(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    name, shard = next(iter(json.loads(text)["weight_map"].items()))
    line = f'"{name}": "{shard}",'
    (folder / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{ {line}'))


def add_tensor(folder: Path) -> None:
    path = first_shard(folder)
    save_file({**load_file(path), "one.more": torch.ones(2)}, path)


def move_outside(folder: Path, shard: str) -> None:
    edit_map(folder, lambda names: names.update({next(iter(names)): shard}))


BROKEN_SHARDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda f: first_shard(f).unlink(), r"safetensors is missing \(1 of"),
    "shard not in the index": (
        lambda f: save_file({"a": torch.ones(1)}, f / "model-00009-of-00009.safetensors"),
        r"model-00009-of-00009\.safetensors is not in model\.safetensors\.index\.json",
    ),
    "tensor listed twice": (list_twice, "is listed 2 times"),
    "tensor not in the index": (add_tensor, "'one.more' of model-00001.* is not listed"),
    "tensor not in its shard": (
        lambda f: edit_map(f, lambda names: names.update(absent=first_shard(f).name)),
        "has no tensor 'absent'",
    ),
    "a path outside": (
        lambda f: move_outside(f, "../model.safetensors"),
        r"'\.\./model\.safetensors', which is not the name of a file in this directory",
    ),
    "an absolute path": (lambda f: move_outside(f, "/etc/passwd"), "'/etc/passwd', which is not"),
    "no file name": (lambda f: edit_map(f, lambda names: names.update(a=7)), "'a' is in 7, which"),
    "no map": (lambda f: (f / INDEX).write_text("{}"), "weight_map must be an object"),
    "a list": (lambda f: (f / INDEX).write_text("[]"), "weight_map must be an object"),
    "no JSON": (lambda f: (f / INDEX).write_text("{"), r"index\.json: Expecting"),
}


@pytest.mark.parametrize("case", BROKEN_SHARDS)
def test_broken_shards(case, shards):
    """An index that disagrees with its shards is refused by the file and the tensor."""
    spoil, message = BROKEN_SHARDS[case]
    spoil(shards)
    with pytest.raises(CheckpointError, match=message):
        read_tensors(shards)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, dtype=torch.int8), "a.weight has dtype int8: only float32, .* quantized"),
        (torch.ones(2).to(torch.float8_e4m3fn), "a.weight has dtype float8_e4m3fn"),
        (torch.ones(2, dtype=torch.bool), "a.weight has dtype bool"),
        (torch.tensor([1.0, torch.nan]), "a.weight has numbers that are not finite"),
        (torch.tensor([1.0, -torch.inf]), "a.weight has numbers that are not finite"),
    ],
)
def test_other_numbers(tensor, message):
    """Integers, eight-bit floats and numbers that are not finite are refused by the tensor's name."""
    with pytest.raises(CheckpointError, match=message):
        check_numbers("a.weight", tensor, "folder")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats(dtype, peer, tmp_path):
    """Weights in other floating-point formats give what transformers computes with them in float32."""
    peer.to(dtype).save_pretrained(tmp_path)
    expected = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same_states(expected, tmp_path)


def test_adapter(peer, tmp_path):
    """Weights that an adapter would change are refused, with what to do."""
    peer.save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: .*--adapter"):
        reader.load_encoder(tmp_path)


def test_prefix_twice(peer, tmp_path):
    """One parameter under two names is refused: which of them counts is not known."""
    peer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    save_file({**state, "bert.pooler.dense.bias": state["pooler.dense.bias"] + 1}, path)
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.bias and bert\.pooler\.dense\.bias"):
        reader.load_encoder(tmp_path)
