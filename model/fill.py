"""Fill in the blanks with a masked language model: `python -m model.fill "The capital of [MASK] is Paris."`."""

import argparse
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from model.checkpoints import reader
from model.checkpoints.errors import CheckpointError
from model.checkpoints.tokenizer_files import read_tokenizer
from model.data import examples
from model.families.registry import family_of
from model.heads import Pretraining
from service.core.encode import Encoder

DEFAULT_CHECKPOINT = Path("runs/quartet-mini/pretrain/checkpoint")


def find_checkpoint(name: str | None) -> Path:
    """Return the directory of a checkpoint, by default DEFAULT_CHECKPOINT. Raises CheckpointError."""
    if name is None and not DEFAULT_CHECKPOINT.is_dir():
        raise CheckpointError(
            f"there is no checkpoint at {DEFAULT_CHECKPOINT} yet: "
            "`python -m model.pretrain model/configs/mini-pretrain.toml` makes it, "
            "and --checkpoint names another, here or on the hub (google-bert/bert-base-uncased)"
        )
    folder = reader.locate(name or DEFAULT_CHECKPOINT)
    generator = folder / "generator"  # of an ELECTRA
    return generator if generator.is_dir() else folder


def read_encoder(folder: Path) -> Encoder:
    """Return the encoder of texts for a checkpoint. Raises CheckpointError for an unsupported tokenizer."""
    return Encoder(read_tokenizer(folder), reader.read_config(folder).max_length)


@torch.no_grad()
def fill(
    model: Pretraining, encoder: Encoder, text: str, top_k: int
) -> list[list[tuple[str, float]]]:
    """Return the best tokens for each mask of a text, with probabilities. Raises ValueError without a mask."""
    mask = family_of(model.config).special_tokens["mask"]
    [encoded] = encoder.texts([text], truncate=False)
    inputs = examples.pack(encoded.windows)
    masked = torch.nonzero(inputs[0] == encoder.tokenizer.token_to_id(mask)).squeeze(1)  # [M]
    if not len(masked):
        raise ValueError(f"the text has no {mask} to fill in")
    token_logits, _ = model(*inputs, masked)  # [M, V]
    best = token_logits.softmax(-1).topk(min(top_k, token_logits.shape[1]))
    return [
        [(encoder.tokenizer.id_to_token(i), p) for i, p in zip(ids, probabilities, strict=True)]
        for ids, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def table(text: str, blanks: list[list[tuple[str, float]]]) -> Table:
    rows = Table(title=Text(text), title_justify="left", box=box.SIMPLE_HEAD)
    rows.add_column("blank", justify="right")
    rows.add_column("token")
    rows.add_column("probability", justify="right")
    for number, tokens in enumerate(blanks, start=1):
        for rank, (token, probability) in enumerate(tokens):
            rows.add_row(str(number) if rank == 0 else "", Text(token), f"{probability:.1%}")
        rows.add_section()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", help="with one [MASK] or several (<mask> in RoBERTa)")
    parser.add_argument(
        "--checkpoint", help=f"a directory or a hub name; default: {DEFAULT_CHECKPOINT}"
    )
    parser.add_argument("--top-k", type=int, default=5, help="tokens per blank")
    arguments = parser.parse_args()
    try:
        folder = find_checkpoint(arguments.checkpoint)
        blanks = fill(
            reader.load_pretraining(folder), read_encoder(folder), arguments.text, arguments.top_k
        )
    except ValueError as error:
        parser.error(str(error))
    Console().print(table(arguments.text, blanks))


if __name__ == "__main__":
    main()
