"""The family BERT: the hub's names for the parts of `model.bert`, which most other families share."""

from model.bert import Bert
from model.config import BertConfig
from model.families.spec import Family

ENCODER_NAMES = {
    r"embeddings\.word": ["embeddings.word_embeddings"],
    r"embeddings\.position": ["embeddings.position_embeddings"],
    r"embeddings\.token_type": ["embeddings.token_type_embeddings"],
    r"embeddings\.norm": ["embeddings.LayerNorm"],
    r"layers\.(\d+)\.attention\.qkv": [
        r"encoder.layer.\1.attention.self.query",
        r"encoder.layer.\1.attention.self.key",
        r"encoder.layer.\1.attention.self.value",
    ],
    r"layers\.(\d+)\.attention\.output": [r"encoder.layer.\1.attention.output.dense"],
    r"layers\.(\d+)\.attention_norm": [r"encoder.layer.\1.attention.output.LayerNorm"],
    r"layers\.(\d+)\.feed_forward\.up": [r"encoder.layer.\1.intermediate.dense"],
    r"layers\.(\d+)\.feed_forward\.down": [r"encoder.layer.\1.output.dense"],
    r"layers\.(\d+)\.feed_forward_norm": [r"encoder.layer.\1.output.LayerNorm"],
    r"pooler\.dense": ["pooler.dense"],
}
BERT = Family(
    config=BertConfig,
    encoder=Bert,
    architecture="Bert",
    prefix="bert.",
    encoder_names=ENCODER_NAMES,
    heads={
        "classification": {"pooler.dense": "bert.pooler.dense", "classifier": "classifier"},
        "ner": {"classifier": "classifier"},
        "qa": {"qa_outputs": "qa_outputs"},
    },
    objectives={
        "masked_lm": "cls.predictions",
        "masked_lm.dense": "cls.predictions.transform.dense",
        "masked_lm.norm": "cls.predictions.transform.LayerNorm",
        "next_sentence.pooler.dense": "bert.pooler.dense",
        "next_sentence.classifier": "cls.seq_relationship",
    },
)
