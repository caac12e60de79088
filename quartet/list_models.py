"""`quartet list`: list the models in the cache, the last used first."""

import argparse
import time

from quartet import cache
from service.core import bundle_cache

DESCRIPTION = """\
List the exported models that quartet serve and quartet pull keep in the cache, the last used first. The cache is
~/.cache/quartet, or quartet in XDG_CACHE_HOME. Above 20 GB, the models that were not used for the longest time go.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    return argparse.ArgumentParser("quartet list", description=DESCRIPTION)


def main() -> int:
    """Print a line for each model. Returns 0."""
    parser().parse_args()
    found = bundle_cache.entries()
    for entry in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s))
        commit = f"@{entry.source.commit[:12]}" if entry.source.commit else ""
        print(f"{entry.source.name}{commit}  {entry.size / 1e6:.1f} MB  used {used}")
    total = sum(entry.size for entry in found) / 1e6
    print(
        f"{bundle_cache.root()}: {len(found)} models, {total:.1f} of {cache.MOST_BYTES / 1e6:,.0f} MB"
    )
    return 0
