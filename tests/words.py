"""Phrasings that the project avoids, and the prose of its files in which they are counted.

`python -m tests.words [FOLDER ...]` prints the lines with such phrasings.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Regular expressions, one a line: they hide the actor, let data speak, or are out of use.
LIST = (ROOT / "tests" / "avoided_words.txt").read_text(encoding="utf-8").split("\n")
AVOIDED = re.compile(rf"(?<!-)\b(?:{'|'.join(filter(None, LIST))})\b", re.IGNORECASE)
SUFFIXES = {".md", ".py", ".toml", ".yml", ".yaml", ".js", ".html"}
COMMENT = re.compile(r"(?:#|//|<!--)\s(.*)")
LITERAL = re.compile(r'"([^"]{12,})"')
# Texts that tests send, and models are trained on, are data: people in them may ask who did something.
QUESTION = re.compile(r"\bwho\b[^?.\"]*\?", re.IGNORECASE)
# A text and its result in a model card, as export.samples writes them.
SAMPLE = re.compile(r"- .+ → \*\*")


def find_files(*folders: str) -> list[Path]:
    """Return the tracked files with prose in these folders or, without any, of the repository but for research/."""
    command = ["git", "ls-files", *folders]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    paths = [ROOT / name for name in names if Path(name).suffix in SUFFIXES]
    return [path for path in paths if "research" not in path.parts and path.is_file()]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of prose: Markdown; comments, docstrings and messages of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        lines = enumerate(text.splitlines(), 1)
        yield from ((number, line) for number, line in lines if not SAMPLE.match(line))
    elif path.suffix == ".py":
        yield from prose_of_python(text)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            yield from ((number, found) for found in COMMENT.findall(line) + LITERAL.findall(line))


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments, and the strings of at least three words, by line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and len(value.split()) > 2:
            yield from enumerate(value.splitlines(), node.lineno)


def avoided(path: Path) -> tuple[int, list[tuple[int, str]]]:
    """Return the number of words of a file's prose, and a numbered line for each phrasing to avoid."""
    lines = [(number, QUESTION.sub("", line)) for number, line in prose(path)]
    words = sum(len(line.split()) for _, line in lines)
    return words, [(number, line) for number, line in lines for _ in AVOIDED.findall(line)]


if __name__ == "__main__":
    for file in find_files(*sys.argv[1:]):
        for number, line in avoided(file)[1]:
            print(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
