"""Whatever `config.json` contains, a checkpoint is read or refused in one line that names the directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from model.checkpoints import reader
from model.checkpoints.config_table import KINDS, check_config, tables_of
from model.checkpoints.errors import CheckpointError
from tests.parity.test_config_settings import save

FAMILIES = ("bert", "distilbert", "modernbert", "nomic_bert", "gte", "deberta-v2")
LEAVES = st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
ABSENT = object()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A classifier of each family, as transformers writes it."""
    transformers.logging.set_verbosity_error()
    return {name: save(tmp_path_factory.mktemp(name) / "saved", name) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_one_field(family, folders, data):
    """A field with another type, without a value, or left out."""
    names = sorted({s.name for table in tables_of(family) for s in table.settings})
    name = data.draw(st.sampled_from(names))
    value = data.draw(VALUES | st.just(ABSENT))
    document = json.loads((folders[family] / "config.json").read_text())
    document[name] = value
    if value is ABSENT:
        del document[name]
    read_or_refuse(folders[family], document)


def test_dropout_rates():
    """A rate that torch refuses is refused by its name, in every family."""
    path, names = Path("config.json"), [name for name in KINDS if "drop" in name]
    assert {"attention_probs_dropout_prob", "classifier_dropout", "attn_pdrop"} < {*names}
    for name in names:
        check_config(path, {name: 1})
        with pytest.raises(CheckpointError, match=f"^config.json: {name} = 2 must be a number"):
            check_config(path, {name: 2})


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(document=VALUES)
@example(document=[])
@example(document={"model_type": []})
@example(document={"model_type": "bert", "architectures": "BertModel"})
def test_any_document(folders, document):
    """Any JSON in the place of a configuration."""
    read_or_refuse(folders["bert"], document)


def read_or_refuse(folder: Path, document: Any) -> None:
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text(json.dumps(document), encoding="utf-8")
    try:
        reader.load_model(copy)
    except CheckpointError as error:
        refusal = str(error)
    else:
        return
    assert str(copy) in refusal
    assert "\n" not in refusal
