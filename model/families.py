"""The families of encoders that are written here: a row each."""

from model.albert import ALBERT
from model.bert_names import BERT
from model.config import BertConfig
from model.deberta import DEBERTA, DEBERTA_V2
from model.distilbert import DISTILBERT
from model.electra import ELECTRA
from model.family import Family
from model.modernbert import MODERNBERT
from model.mpnet import MPNET
from model.nomic_bert import NOMIC_BERT
from model.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA

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
        DEBERTA,
        DEBERTA_V2,
    )
}


def family_of(config: BertConfig) -> Family:
    return FAMILIES[config.model_type]


def family_named(model_type: str) -> Family:
    """Raises ValueError naming those that there are."""
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is none of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
