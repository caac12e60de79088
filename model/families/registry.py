"""The table of all encoder families."""

from model.config import ORIGINAL_NAMES, BertConfig
from model.families.albert import ALBERT
from model.families.bert_names import BERT
from model.families.deberta import DEBERTA, DEBERTA_V2
from model.families.distilbert import DISTILBERT
from model.families.electra import ELECTRA
from model.families.eurobert import EUROBERT
from model.families.gemma3 import GEMMA3
from model.families.gte import GTE
from model.families.jina import JINA
from model.families.modernbert import MODERNBERT
from model.families.mpnet import MPNET
from model.families.nomic_bert import NOMIC_BERT
from model.families.qwen3 import QWEN3
from model.families.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA
from model.families.spec import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        BERT,
        ROBERTA,
        XLM_ROBERTA,
        CAMEMBERT,
        DISTILBERT,
        ALBERT,
        ELECTRA,
        MPNET,
        MODERNBERT,
        NOMIC_BERT,
        GTE,
        JINA,
        EUROBERT,
        QWEN3,
        GEMMA3,
        DEBERTA,
        DEBERTA_V2,
    )
}

# The families that pretraining can train.
PRETRAINABLE = {name: family for name, family in FAMILIES.items() if family.has_masked_lm}


def family_of(config: BertConfig) -> Family:
    """Return the family of a configuration."""
    return FAMILIES[config.model_type]


def family_named(model_type: str) -> Family:
    """Return the family of a `model_type`. Raises ValueError with the known ones."""
    family = FAMILIES.get(ORIGINAL_NAMES.get(model_type, model_type))
    if family is None:
        raise ValueError(
            f"model_type {model_type!r} is none of {', '.join(FAMILIES)}, and code of a checkpoint is not run: "
            "an ONNX graph of the model may be served instead"
        )
    return family
