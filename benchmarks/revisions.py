"""The speed of this checkout relative to another one, such as a worktree of an earlier commit.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.revisions /tmp/before [--bundle DIR] [--mix news] [--rounds 5] [--seconds 3]

Both serve the same bundle with this environment's packages, in interleaved rounds, at fp32 and at int8. A difference
beyond the range of the rounds is a difference of the code.
"""

import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.lib import models, rounds, run_record, servers, traffic


def main() -> None:
    parser = rounds.parser(__doc__, (1, 8, 32))
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--bundle", type=Path, help="a full bundle; MiniLM is exported by default")
    parser.add_argument("--mix", choices=traffic.MIXES, default="news", help="lengths of texts")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "int8"])
    options = parser.parse_args()
    texts = traffic.texts(traffic.MIXES[options.mix])
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = servers.to_bundle(Path(sys.executable), options.bundle or models.minilm(), scratch)
        for precision in options.precisions:
            here = replace(servers.quartet(precision), name=f"{precision} here")
            there = replace(here, name=f"{precision} before", folder=options.before.resolve())
            results[precision] = rounds.table(
                [there, here], "embed", model.resolve(), texts, scratch, options
            )
        run_record.write({"results": results}, options.out, model)
    for row in itertools.chain(*results.values()):
        if row.get("skipped"):
            raise SystemExit(f"{row['server']}: {row['skipped']}")


if __name__ == "__main__":
    main()
