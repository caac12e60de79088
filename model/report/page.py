"""A self-contained HTML page of sections, and the file that keeps them so that others can be added later.

<output>/report.html   the page: opens from disk, without scripts and external resources
<output>/report.json   its sections
"""

import base64
import html
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

PAGE, STORED = "report.html", "report.json"

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #8884; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.3rem; } h1, h2, p, figcaption { overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 0.5rem 0; display: block; overflow-x: auto; }
td, th { padding: 0.2rem 0.7rem; text-align: left; vertical-align: top; }
th { font-weight: 600; } tr + tr td { border-top: 1px solid #8883; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; max-width: 34rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; } figure { margin: 0; } figcaption { font-weight: 600; }
svg { max-width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
img { max-width: 100%; background: white; }
.legend span { margin-right: 1rem; }
.legend i { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.3em; }
.legend { margin: 0; font-size: 13px; } .note { color: #888; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass
class Section:
    """A part of the page. name: replaces the section of the same name; body: HTML"""

    name: str
    title: str
    body: str


@dataclass
class Report:
    """The content of a page."""

    title: str
    sections: list[Section] = field(default_factory=list)

    def add(self, section: Section) -> None:
        """Add a section at the end, or in the place of the one of its name."""
        for number, each in enumerate(self.sections):
            if each.name == section.name:
                self.sections[number] = section
                return
        self.sections.append(section)

    def write(self, folder: Path) -> None:
        """Write the page and its sections, each in one rename."""
        document = json.dumps(asdict(self))
        for name, text in ((STORED, document), (PAGE, self.render())):
            partial = folder / f"{name}.partial"
            partial.write_text(text, encoding="utf-8", errors="replace")
            os.replace(partial, folder / name)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the report of a run's directory; None where it has none that can be read."""
        try:
            stored = json.loads((folder / STORED).read_text(encoding="utf-8"))
            return cls(stored["title"], [Section(**each) for each in stored["sections"]])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def render(self) -> str:
        """Return the page as HTML."""
        title = html.escape(self.title)
        parts = (f"<h2>{html.escape(each.title)}</h2>\n{each.body}" for each in self.sections)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
            + "\n".join(parts)
            + "\n</body>\n</html>\n"
        )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], texts: Sequence[int] = ()) -> str:
    """Return a table as HTML. Numbers are aligned to the right. texts: columns of texts with line breaks"""
    numeric = {
        place
        for place in range(len(head))
        if rows and all(isinstance(row[place], int | float | Figure) for row in rows)
    }
    kinds = {**dict.fromkeys(numeric, "number"), **dict.fromkeys(texts, "text")}

    def cells(tag: str, row: Sequence[Any]) -> str:
        return "".join(
            f"<{tag}{attributes(kinds.get(place, ''), cell)}>{show(cell)}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f"<table>\n<tr>{cells('th', head)}</tr>\n{body}</table>\n"


@dataclass(frozen=True)
class Figure:
    """A number as text, with the strength of its background from 0 to 1."""

    text: str
    strength: float = 0.0


def attributes(kind: str, cell: Any) -> str:
    """Return the attributes of a cell."""
    named = f' class="{kind}"' if kind else ""
    if isinstance(cell, Figure) and cell.strength > 0:
        named += f' style="background:rgba(37,99,235,{min(cell.strength, 1) * 0.7:.2f})"'
    return named


def show(cell: Any) -> str:
    """Return a cell as HTML: texts are escaped, numbers have four digits."""
    if isinstance(cell, Figure):
        return html.escape(cell.text)
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return html.escape(str(cell))
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4f}"


def facts(values: Mapping[str, Any]) -> str:
    """Return names and values as a table without a head."""
    rows = (
        f"<tr><th>{html.escape(name)}</th><td>{show(value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>\n"


def figures(charts: Mapping[str, str]) -> str:
    """Return charts next to each other, each under its title; charts without content are left out."""
    parts = (
        f"<figure><figcaption>{html.escape(title)}</figcaption>{chart}</figure>"
        for title, chart in charts.items()
        if chart
    )
    return f'<div class="charts">{"".join(parts)}</div>\n'


def note(text: str) -> str:
    """Return a remark."""
    return f'<p class="note">{html.escape(text)}</p>\n'


def picture(figure: Any, text: str) -> str:
    """Return a Matplotlib figure as an embedded PNG. text: its description"""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'
