"""Give emoji tokens of their own: `python -m model.emoji CHECKPOINT OUT`.

BERT's vocabulary has no emoji: all of them are the unknown token. An emoji takes the place of an unused token
(`[unused0]`), and its embedding begins as the mean of the words of its Unicode name: U+1F621 is "pouting face".
"""

import argparse
import json
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from model.checkpoints import writer
from model.checkpoints.source import read_source

UNUSED = re.compile(r"\[unused\d+\]")
# First and last: faces and gestures, people's faces and hands, hearts and marks, celebrations; then some signs.
RANGES = ("😀🙏", "🤐🥺", "👀👐", "💋💯", "🎀🎓")
SINGLE = "☀☹☺☎☕✅✈✉✌✔✨❌❤⭐🌈🌞🌟🌹🍀🍕🍺🎵🏆🏠🐱🐶💻📅📈📉📎📞📦📧📷🔒🔥🔧🔴🕐🚀🚗🛒"
FILLERS = re.compile("face|sign|with|symbol|black|heavy|white")  # words of names without a meaning


def emoji() -> dict[str, list[str]]:
    """Return emoji with the words of their Unicode names, without words that many names have."""
    signs = [chr(code) for ends in RANGES for code in range(ord(ends[0]), ord(ends[1]) + 1)]
    names = {sign: unicodedata.name(sign, "").lower() for sign in [*signs, *SINGLE]}
    split = {sign: re.findall(r"[a-z]+", name) for sign, name in names.items() if name}
    kept = {n: [w for w in words if not FILLERS.fullmatch(w)] for n, words in split.items()}
    return {sign: kept[sign] or words for sign, words in split.items()}


def add_tokens(tokenizer: dict[str, Any], signs: Mapping[str, Any]) -> dict[str, int]:
    """Replace unused tokens of a `tokenizer.json` by signs; return the id of each. Raises ValueError for too few."""
    vocabulary = tokenizer["model"]["vocab"]
    unused = sorted(filter(UNUSED.fullmatch, vocabulary), key=vocabulary.__getitem__)
    new = [sign for sign in signs if sign not in vocabulary]
    if len(unused) < len(new):
        raise ValueError(f"the tokenizer has {len(unused)} unused tokens for {len(new)} emoji")
    ids = {sign: vocabulary.pop(token) for sign, token in zip(new, unused, strict=False)}
    vocabulary |= ids
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokens = [{"id": number, "content": sign, **flags} for sign, number in ids.items()]
    added = tokenizer["added_tokens"] + tokens
    tokenizer["added_tokens"] = sorted(added, key=lambda token: token["id"])
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model.emoji", description=__doc__)
    parser.add_argument("checkpoint", help="a directory, a hub name or package:NAME/FOLDER")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    try:
        source = read_source(given.checkpoint)
        names = emoji()
        read = source.tokenizer
        document = json.loads(read.to_str())
        ids = add_tokens(document, names)
        words = source.model.get_parameter("encoder.embeddings.word.weight")
        with torch.no_grad():
            for sign, number in ids.items():
                pieces = read.encode(" ".join(names[sign]), add_special_tokens=False).ids
                words[number] = words[pieces].mean(dim=0)
        with writer.replacing(given.out) as folder:
            folder.mkdir(parents=True)
            file = folder / "tokenizer.json"
            file.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
            if source.model.described:
                writer.save_joint(folder, source.model, file)
            else:
                writer.save_encoder(folder, source.model.encoder, file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None
    print(f"{given.out}: {len(ids)} emoji")


if __name__ == "__main__":
    main()
