"""Rerankers that are language models: a pair's score is the logit of "yes" minus that of "no" after its last token.

Each such pair is one text: a template puts the instruction, the query and the document in it. The head multiplies by
the difference of two rows of the output matrix, so the logits of other tokens are never computed.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, processors

from model.checkpoints.errors import CheckpointError
from model.checkpoints.head_config import cross_encoder_type, is_cross_encoder, validate_head
from model.checkpoints.json_files import read_json, read_object
from model.checkpoints.reader import load_encoder, read_weights
from model.checkpoints.sentence_config import (
    LOGIT_TABLE,
    config_file,
    encoder_folder,
    is_sentence_directory,
    read_module_list,
)
from model.checkpoints.tokenizer_files import render_chat
from model.heads import EncoderWithHeads
from service.core.manifest import FIRST_TEXT

SCORE = "LogitScore"  # the module of sentence-transformers
OUTPUT = "lm_head.weight"
PAIR = ("\ue000query\ue000", "\ue000document\ue000")  # stand for texts in a rendered chat template
# The template in the model cards of Qwen3-Reranker, with the instruction for web searches.
QWEN3_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web'
    " search query, retrieve relevant passages that answer the query\n"
    f"<Query>: {FIRST_TEXT}\n<Document>: "
)
QWEN3_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class YesNo:
    """How a language model scores a pair.

    before: the text before the document, which contains FIRST_TEXT in place of the query; after: the text that follows
    yes, no: the ids of the tokens whose logits make the score; `no` may be None
    problem_type: for the activation of the score
    """

    before: str
    after: str
    yes: int
    no: int | None
    problem_type: str = "single_label_classification"

    def append(self, tokenizer: Tokenizer) -> None:
        """Make the tokens of `after` the special tokens at the end of each text, which no truncation removes."""
        added = tokenizer.encode(self.after, add_special_tokens=False)
        end = {"id": "end", "ids": added.ids, "tokens": added.tokens}
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A end", pair="$A $B end", special_tokens=[end]
        )


def is_yes_no(folder: Path, task: str | None) -> bool:
    """Return whether to read a directory as such a reranker: by its LogitScore, or a language model by the task."""
    if is_sentence_directory(folder):
        return is_cross_encoder(folder) and any(
            kind == SCORE for kind, _ in read_module_list(folder)
        )
    names = read_json(config_file(folder)).get("architectures") or [""]
    return task == "classification" and str(names[0]).endswith("ForCausalLM")


def read_yes_no(folder: Path, tokenizer: Tokenizer) -> YesNo:
    """Return how a language model scores a pair: by its chat template, or by Qwen3's where there is no LogitScore.

    Raises CheckpointError.
    """
    if is_sentence_directory(folder):
        return _read_logit_score(folder)
    kind = read_json(config_file(folder)).get("model_type")
    if kind != "qwen3":
        raise CheckpointError(f"{config_file(folder)}: no template is known for a {kind} reranker")
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    if yes is None or no is None:
        raise CheckpointError(
            f"{folder}: the tokenizer has no token 'yes' or 'no', which a reranker needs"
        )
    return YesNo(QWEN3_BEFORE, QWEN3_AFTER, yes, no)


def _read_logit_score(folder: Path) -> YesNo:
    modules = read_module_list(folder)
    kinds = ", ".join(kind for kind, _ in modules)
    if kinds != f"Transformer, {SCORE}":
        path = folder / "modules.json"
        raise CheckpointError(f"{path}: cannot serve {kinds}: they must be Transformer, {SCORE}")
    file = modules[1][1] / "config.json"
    config = read_object(file)
    LOGIT_TABLE.check(file, config)
    ids = config.get("true_token_id"), config.get("false_token_id")
    if type(ids[0]) is not int or type(ids[1]) not in (int, type(None)):
        raise CheckpointError(f"{file}: true_token_id and false_token_id = {ids} must be integers")
    text = render_chat(encoder_folder(folder), *PAIR)
    before, *after = text.split(PAIR[1])
    if before.count(PAIR[0]) != 1 or len(after) != 1 or PAIR[0] in after[0]:
        raise CheckpointError(
            f"{folder}: the chat template must have the messages of the roles query and document once, in this order"
        )
    kind = cross_encoder_type(folder, read_json(config_file(folder)), labels=1)
    return YesNo(before.replace(PAIR[0], FIRST_TEXT), after[0], *ids, problem_type=str(kind))


def load_yes_no(folder: Path, scoring: YesNo) -> EncoderWithHeads:
    """Return a language model's encoder with the head of a cross-encoder. Raises CheckpointError."""
    encoder = load_encoder(folder, pooler=False)
    path = config_file(folder)
    output = encoder.embeddings.word.weight  # [V, H]
    if not read_json(path).get("tie_word_embeddings", False):
        weights = read_weights(folder)
        if OUTPUT not in weights:
            raise CheckpointError(
                f"{folder}: {OUTPUT} is missing, and {path} does not tie the embeddings to it"
            )
        output = weights[OUTPUT].float()
    ids = [token for token in (scoring.yes, scoring.no) if token is not None]
    if not 0 <= min(ids) <= max(ids) < len(output):
        raise CheckpointError(
            f"{folder}: {OUTPUT} has {len(output)} rows, and the score needs {ids}"
        )
    head = validate_head(
        path,
        task="classification",
        labels=("LABEL_0",),
        problem_type=scoring.problem_type,
        pair_prompt=scoring.before,
    )
    model = EncoderWithHeads(encoder.config, {"classification": head}, encoder)
    with torch.no_grad():
        no = 0 if scoring.no is None else output[scoring.no]  # [H]
        score = output[scoring.yes] - no  # [H]
        model.heads["classification"].score.weight.copy_(score[None])
    return model.eval()
