"""Checks of commands: the paths of bundles, and the results of a candidate version."""

import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from service.core.addresses import address
from service.core.manifest import Manifest
from service.errors import ChangedAnswers, Forbidden, InvalidInput
from service.observability.metrics import Counts

# The rest of an address below an allowed one: plain names, so that no server reads it as another address.
BELOW = re.compile(r"[A-Za-z0-9_@-][\w.+=@-]*(/[A-Za-z0-9_@-][\w.+=@-]*)*", re.ASCII)


def check_answers(model: str, compared: Counts, max_changed: float, min_compared: int) -> None:
    """Raise ChangedAnswers when too few results were compared, or too large a share of a head's changed or failed."""
    known = {
        head: (at.get("changed", 0) + at.get("failed", 0), at.get("same", 0))
        for head, at in compared.items()
    }
    number = sum(map(sum, known.values()))
    if number < min_compared:
        raise ChangedAnswers(
            f"{model}: {number} answers were compared, and {min_compared} are wanted",
            param="min_compared",
        )
    for head, (changed, same) in known.items():
        if changed > max_changed * (changed + same):
            raise ChangedAnswers(
                f"{model}: of {changed + same} answers of {head}, {changed} changed or failed"
                f" ({changed / (changed + same):.2%}), and {max_changed:.2%} may",
                param="max_changed",
            )


def embeds(manifest: Manifest) -> bool:
    return any(head.gives_vectors for head in manifest.heads.values())


def locate(models_dir: Path | None, path: str, sources: Sequence[str] = ()) -> Path:
    """Return the directory or address of a bundle from its path, or from its name in `models_dir`.

    sources: addresses, with a slash at the end, below which `path` may be
    Raises Forbidden where `models_dir` is unset, and InvalidInput for a path that leads out of it and of all sources.
    """
    if models_dir is not None and (root_url := address(models_dir)):
        sources = (*sources, f"{root_url}/")
        path = path if address(path) else f"{root_url}/{path}"
    if url := address(path):
        if any(url.startswith(one) and BELOW.fullmatch(url, len(one)) for one in sources):
            return Path(url)
        allowed = ", ".join(sources) or "model_sources is unset"
        raise InvalidInput(f"path: {url} is not below {allowed}", param="path")
    if models_dir is None:
        raise Forbidden("models_dir is unset: set it to load and unload bundles")
    root = models_dir.absolute()
    try:
        parts = (root / path).relative_to(root).parts
        folders = [root.joinpath(*parts[: end + 1]) for end in range(len(parts))]
        if not parts or any(part.startswith(".") for part in parts):
            raise ValueError(f"is not a directory in {root}")
        for folder in folders:
            # Not `is_symlink`, which from Python 3.14 on returns False for a name that is too long.
            with suppress(FileNotFoundError):
                if stat.S_ISLNK(folder.lstat().st_mode):
                    raise ValueError("must not contain a symbolic link")
    except (ValueError, OSError) as error:
        raise InvalidInput(f"path: {error}", param="path") from None
    return folders[-1]
