"""The bundle's model card: description, training, data, measured quality, limits."""

from collections.abc import Mapping
from typing import Any

from service.core.manifest import Head, Manifest

CARD = "README.md"  # the file in a bundle


def render(manifest: Manifest, metadata: Mapping[str, Any], parity: Mapping[str, str]) -> str:
    """Return the model card as Markdown.

    metadata: the provenance file; `description`, `training` and `limits` are in the card alone
    parity: the results of the checks, by graph
    """
    parts = [
        f"# {manifest.name} {manifest.version}",
        str(metadata.get("description", "An encoder exported with Quartet.")).strip(),
        _external(manifest),
        _heads(manifest),
        _metrics(manifest),
        _parity(parity),
        _training(manifest, metadata.get("training", "")),
        _data(manifest),
        _section("Limits", metadata.get("limits")),
        _terms(manifest),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _external(manifest: Manifest) -> str:
    """Describe a graph that another tool exported; empty for our own."""
    layouts = {graph.layout for graph in manifest.graphs}
    if not layouts & {"padded", "alone"}:
        return ""
    text = (
        "Its one graph was exported by another tool and has the head appended. The goldens are its own answers: that "
        "it answers as the model that it was made from has not been checked."
    )
    if "alone" in layouts:
        text += (
            " Its answers depend on what shares a batch with them, so each text is computed alone."
        )
    return _section("The graph", text)


def _section(title: str, text: str | None) -> str:
    return f"## {title}\n\n{text.strip()}" if text else ""


def _table(header: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _heads(manifest: Manifest) -> str:
    rows = [
        [f"`{name}`", head.task, _meaning(head), "demo" if head.demo else ""]
        for name, head in manifest.heads.items()
    ]
    rows_table = _table(["head", "task", "gives", ""], rows)
    longer = "longer text is cut or read in windows, as the request says"
    return f"## Heads\n\nInputs of up to {manifest.max_length} tokens; {longer}.\n\n{rows_table}"


def _meaning(head: Head) -> str:
    if head.labels:
        return ", ".join(head.labels)
    if head.per_pair:
        return f"{'scores' if head.scores_texts else 'entities'} with the labels of a request"
    if head.per_mask:
        return f"a score of each of {head.vocabulary_size} tokens at a mask token"
    if head.sparse is not None:
        return f"weights of the {head.vocabulary_size} tokens of the vocabulary"
    if head.task == "qa":
        return f"answer spans of up to {head.max_answer_tokens} tokens"
    if head.task == "late-interaction":
        return f"{head.dimensions} numbers for each token"
    pooling = " + ".join(head.pooling_modes) or "the graph's own"
    parts = [f"{head.dimensions} numbers, {pooling} pooling"]
    if head.matryoshka_dimensions:
        parts.append(f"trained for {', '.join(map(str, head.matryoshka_dimensions))} dimensions")
    if head.prompts:
        default = f", {head.default_prompt} by default" if head.default_prompt else ""
        parts.append(f"prompts {', '.join(head.prompts)}{default}")
    return "; ".join(parts)


def _metrics(manifest: Manifest) -> str:
    rows = [
        [f"`{name}`", precision, ", ".join(f"{key} {value:.2f}" for key, value in values.items())]
        for name, precisions in manifest.metrics.items()
        for precision, values in precisions.items()
    ]
    if not rows:
        return ""
    table = _table(["head", "precision", "measured"], rows)
    return f"## Quality\n\nMeasured through the exported graphs.\n\n{table}"


def _parity(parity: Mapping[str, str]) -> str:
    table = _table(["graph", "measured at export"], [[key, value] for key, value in parity.items()])
    return f"## Parity\n\n{table}"


def _training(manifest: Manifest, text: str) -> str:
    names = " and ".join(f"`{name}`" for name in manifest.provenance.teachers)
    distilled = f"Distilled from {names}." if names else ""
    return _section("How it was trained", f"{distilled}\n\n{text}".strip())


def _data(manifest: Manifest) -> str:
    rows = [
        [data.name, data.used_for, data.origin, data.terms, data.commercial_use]
        for data in manifest.provenance.datasets
    ]
    if not rows:
        return ""
    header = ["data set", "used for", "origin", "terms", "commercial use"]
    return f"## Data\n\n{_table(header, rows)}"


def _terms(manifest: Manifest) -> str:
    own = " The data sets have terms of their own, above." * bool(manifest.provenance.datasets)
    named = manifest.weights_license
    weights = "no license is named" if named == "unknown" else named
    text = (
        f"Weights: {weights}.{own}\n\n"
        f"Do the terms of the data allow commercial use? {manifest.provenance.commercial_use}"
    )
    by_head = manifest.provenance.commercial_use_by_head(manifest.heads)
    if len(set(by_head.values())) > 1:
        rows = [[f"`{head}`", use] for head, use in by_head.items()]
        text += f"\n\n{_table(['head', 'commercial use, by the terms of its own data'], rows)}"
    return _section("Terms", text)
