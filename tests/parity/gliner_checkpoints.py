"""Checkpoints in GLiNER's layout, of weights that a seed decides, and what the package `gliner` computes with them.

`python tests/parity/gliner_checkpoints.py` writes the file RECORDED. It runs where `gliner` is installed, and imports
nothing of Quartet.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

RECORDED = Path(__file__).with_name("gliner_recorded.json")
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
MARKERS = ("<<ENT>>", "<<SEP>>")
PIECES = (
    "the",
    "in",
    "ing",
    "er",
    "an",
    "on",
    "re",
    "st",
    "or",
    "en",
    "ar",
    "al",
    "it",
    "is",
    "at",
)
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"()-_&%$/"
TEXTS = (
    "Ada Lovelace met Charles Babbage in London, and wrote to Mary-Anne in 1843.",
    "The ferry to Öland was late; nobody minded 😀 (much).",
    "Paris",
    "  two\tspaces  and a well-known_name.  ",
    "Marta Lindqvist left Volvo in Gothenburg and opened a bakery near Lake Siljan, where the river "
    "turns north and the road to Mora begins, in the spring of 1998.",
)
LABELS = (["person", "city"], ["organization", "date of birth", "place", "event"], ["x"])
THRESHOLDS = {"spans": 0.55, "token": 0.4}  # by the beginning of a case's name
ENCODERS: dict[str, dict[str, Any]] = {
    "deberta-v2": {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "position_buckets": 16,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
    },
    "modernbert": {
        "model_type": "modernbert",
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "bert": {"model_type": "bert"},
}
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
CASES: dict[str, dict[str, Any]] = {
    "spans-deberta-lstm": {"encoder": "deberta-v2", "num_rnn_layers": 1, "hidden_size": 24},
    "spans-modernbert": {"encoder": "modernbert", "num_rnn_layers": 0, "hidden_size": 32},
    "spans-bert-lstm-2": {
        **{"encoder": "bert", "num_rnn_layers": 2, "hidden_size": 32, "max_width": 5},
        "embed_ent_token": False,
    },
    "tokens-deberta-lstm": {
        **{"encoder": "deberta-v2", "num_rnn_layers": 1, "hidden_size": 24},
        "span_mode": "token_level",
    },
    "tokens-modernbert": {
        **{"encoder": "modernbert", "num_rnn_layers": 0, "hidden_size": 32},
        "span_mode": "token_level",
    },
}


def make_tokenizer(encoder: str, markers: tuple[str, ...] = MARKERS) -> tokenizers.Tokenizer:
    """Return a small tokenizer of the encoder's kind, whose vocabulary no trainer decides."""
    if encoder == "deberta-v2":
        pieces = [*SPECIAL, "\u2581", *(f"\u2581{piece}" for piece in PIECES), *PIECES, *CHARACTERS]
        vocab = [(piece, -float(len(SPECIAL) + len(pieces) - len(piece))) for piece in pieces]
        made = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=3))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = decoders.Metaspace(prepend_scheme="always")
    elif encoder == "modernbert":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("\u0120", "t")]
        words = [*SPECIAL, *letters, *(a + b for a, b in merges)]
        vocab_ids = {word: index for index, word in enumerate(words)}
        made = tokenizers.Tokenizer(models.BPE(vocab_ids, merges))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        pieces = [*PIECES, *CHARACTERS.lower()]
        words = list(dict.fromkeys([*SPECIAL, *pieces, *(f"##{piece}" for piece in pieces)]))
        vocab_ids = {word: index for index, word in enumerate(words)}
        made = tokenizers.Tokenizer(models.WordPiece(vocab_ids, unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
    made.add_special_tokens([*SPECIAL, *markers])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return made


def gliner_config(case: str) -> dict[str, Any]:
    fields = {**CASES[case]}
    encoder = fields.pop("encoder")
    tokenizer = make_tokenizer(encoder)
    rows = tokenizer.get_vocab_size()
    return {
        "model_name": "none",
        "span_mode": "markerV0",
        "max_width": 6,
        "subtoken_pooling": "first",
        "words_splitter_type": "whitespace",
        "ent_token": MARKERS[0],
        "sep_token": MARKERS[1],
        "class_token_index": tokenizer.token_to_id(MARKERS[0]),
        "vocab_size": rows,
        "encoder_config": {**ENCODERS[encoder], **SHAPE, "vocab_size": rows},
        **fields,
    }


def make_tensor(name: str, shape: list[int]) -> "np.ndarray[Any, Any]":
    """Return a tensor's numbers, which its name and shape decide."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
    values = random.normal(0, scale, shape)
    if "norm" in name.lower() and name.endswith("weight"):
        values = 1 + values
    return values.astype(np.float32)


def save(folder: Path, case: str, shapes: dict[str, list[int]]) -> Path:
    """Write a checkpoint's directory, as `save_pretrained` does; returns it."""
    tokenizer = make_tokenizer(CASES[case]["encoder"])
    return write(folder, "gliner_config.json", gliner_config(case), tokenizer, shapes)


def write(
    folder: Path,
    name: str,
    config: dict[str, Any],
    tokenizer: tokenizers.Tokenizer,
    shapes: dict[str, list[int]],
) -> Path:
    """Write a configuration, a tokenizer and weights of these shapes; returns the directory."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk", "mask")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors = {name: make_tensor(name, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def record(folder: Path) -> None:
    """Write RECORDED: by case, the shapes of its tensors and the entities of TEXTS."""
    from gliner import GLiNER

    recorded = {}
    for case in CASES:
        place = save(folder / case, case, {})
        config = json.loads((place / "gliner_config.json").read_text())
        config["model_name"] = str(place)
        model = GLiNER.from_config(config, backbone_from_pretrained=False)
        shapes = {
            name: list(tensor.shape)
            for name, tensor in model.model.state_dict().items()
            if not name.endswith("position_ids")
        }
        save(place, case, shapes)
        model = GLiNER.from_pretrained(str(place), local_files_only=True).eval()
        results = [
            [
                [[e["label"], round(e["score"], 6), e["start"], e["end"]] for e in entities]
                for entities in model.inference(
                    list(TEXTS), labels, flat_ner=not nested, threshold=THRESHOLDS[case[:5]]
                )
            ]
            for labels in LABELS
            for nested in (False, True)
        ]
        recorded[case] = {"shapes": shapes, "results": results}
        print(case, [[len(entities) for entities in one] for one in results])
    RECORDED.write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
