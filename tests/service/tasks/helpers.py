"""An engine's parts that the plans of tasks read."""

from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from service.core.encode import Encoder
from service.core.manifest import Head
from service.engines.engine import Engine

WORDS = ["[UNK]", "[CLS]", "[SEP]", "query:", "passage:", "sea", "ship"]
BASE: dict[str, Any] = {"task": "embedding", "pooling": "mean", "dimensions": 4}


def engine(max_length: int = 16, **heads: dict[str, Any]) -> Any:
    """An engine's parts that plans read."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    described = {name: Head.model_validate({**BASE, **own}) for name, own in heads.items()}
    made = SimpleNamespace(
        id="tiny@1",
        encoder=Encoder(tokenizer, max_length),
        manifest=SimpleNamespace(heads=described),
    )
    made.select_head = lambda task, wanted: Engine.select_head(made, task, wanted)
    made.check_stride = lambda wanted: Engine.check_stride(made, wanted)
    made.check_prompt = lambda prompt, param: Engine.check_prompt(made, prompt, param)
    return made
