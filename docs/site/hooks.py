"""Hooks of mkdocs: links out of docs/, and Mermaid pictures as SVG, so that a page loads nothing from another host."""

import hashlib
import posixpath
import re
from pathlib import Path
from typing import Any

import mermaidx

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "build" / "mermaid"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Drop navigation entries whose pages are absent, and sections that are empty then."""
    config.nav = existing(config.nav, Path(config.docs_dir))
    return config


def existing(entries: list[dict[str, Any]], docs: Path) -> list[dict[str, Any]]:
    """Return the entries of a navigation whose pages exist."""
    kept = []
    for entry in entries:
        [(title, value)] = entry.items()
        pages = existing(value, docs) if isinstance(value, list) else value
        if pages and (isinstance(pages, list) or (docs / pages).exists()):
            kept.append({title: pages})
    return kept


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Draw the Mermaid pictures of a page, and make links out of docs/ ones that mkdocs does not follow."""
    markdown = FENCE.sub(lambda match: draw(match[1]), markdown)
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    def leave(match: re.Match[str]) -> str:
        # A page lies as deep in site/ as its source lies in docs/, so a relative link reaches the checkout from there.
        target = posixpath.normpath(
            posixpath.join("docs", posixpath.dirname(page.file.src_uri), match[2])
        )
        if target.startswith("docs/"):
            return match[0]
        return f'<a href="{match[2]}{match[3] or ""}">{match[1]}</a>'

    text = LINK.sub(leave, CODE.sub(keep, markdown))
    return re.sub("\0(\\d+)\0", lambda match: kept[int(match[1])], text)


def draw(source: str) -> str:
    """Return an SVG of a Mermaid picture; the result is kept in build/, because drawing takes seconds."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    file = PICTURES / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.svg"
    if not file.exists():
        file.write_text(mermaidx.render(source).svg(), encoding="utf-8")
    picture = re.sub(
        r"\n\s*\n", "\n", file.read_text(encoding="utf-8")
    )  # a blank line would end the HTML block
    return f'<figure class="mermaid-picture">{picture}</figure>\n'
