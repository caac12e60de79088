"""Draw attention weights: `python -m model.attention_map "The cat sat." -o map.png [--pair TEXT] [--layer 1]`.

L layers, N heads, S tokens
"""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from model.checkpoints import reader
from model.fill import DEFAULT_CHECKPOINT, find_checkpoint, read_encoder
from model.training.capture import attention_maps

MAX_TOKENS = 48  # labels and cells of more are too small to read


def draw(
    maps: Tensor,
    tokens: list[str],
    text: str,
    layer_numbers: Sequence[int] = (),
    head_numbers: Sequence[int] = (),
) -> Figure:
    """Draw one cell per layer (row) and head (column); layer_numbers, head_numbers: of `maps`, from 1."""
    layers, heads, size, _ = maps.shape
    layer_numbers = layer_numbers or range(1, layers + 1)
    head_numbers = head_numbers or range(1, heads + 1)
    cell = max(1.4, 0.14 * size)  # inches: room for a label of 7 points per token
    figure = Figure(figsize=(heads * cell + 2, layers * cell + 2), dpi=100, layout="compressed")
    grid = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    norm = PowerNorm(0.5, vmin=0, vmax=1)  # so that a weight of 5 % still shows
    for layer, row in enumerate(grid):
        for head, axes in enumerate(row):
            image = axes.imshow(maps[layer, head].numpy(), cmap="Blues", norm=norm)
            axes.tick_params(length=0, labelsize=7)
            axes.spines[:].set_color("0.8")
            if layer == 0:
                axes.set_title(f"head {head_numbers[head]}", fontsize=9)
        row[0].set_ylabel(f"layer {layer_numbers[layer]}", fontsize=9)
        row[0].set_yticks(range(size), tokens, parse_math=False)
    for axes in grid[-1]:
        axes.set_xticks(range(size), tokens, rotation=90, parse_math=False)
    ticks = [0, 0.05, 0.2, 0.5, 1]
    bar = figure.colorbar(
        image, ax=grid, ticks=ticks, format="{x:.0%}", shrink=1 / layers, anchor=(0, 1), pad=0.01
    )
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)
    title = textwrap.shorten(text, max(20, 10 * int(figure.get_figwidth())), placeholder=" …")
    figure.suptitle(title, fontsize=12, parse_math=False)
    figure.supxlabel("each row: attention of a token to those below", fontsize=8, color="0.4")
    return figure


def choose(name: str, numbers: Sequence[int], count: int) -> list[int]:
    """Return the chosen layers or heads, from 1; all for none. Raises ValueError, with the option's name."""
    for number in numbers:
        if not 1 <= number <= count:
            raise ValueError(f"{name}: {number} is not from 1 to {count}")
    return sorted({*numbers}) or list(range(1, count + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text", help="a text")
    parser.add_argument("--pair", metavar="TEXT", help="a second text, read with the first")
    for what in ("layer", "head"):
        parser.add_argument(
            f"--{what}",
            type=int,
            nargs="+",
            default=[],
            metavar="N",
            help=f"draw only these {what}s, from 1; default: all. Example: --{what} 1 4",
        )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="a .png, .svg or .pdf file"
    )
    parser.add_argument(
        "--checkpoint", help=f"a directory or a hub name; default: {DEFAULT_CHECKPOINT}"
    )
    arguments = parser.parse_args()
    try:
        folder = find_checkpoint(arguments.checkpoint)
        cut = read_encoder(folder)
        single = cut.texts([arguments.text]) if arguments.pair is None else None
        [encoded] = single or cut.pairs([arguments.text], [arguments.pair])
        if len(encoded.windows[0]) > MAX_TOKENS:
            raise ValueError(
                f"{len(encoded.windows[0])} tokens are too many to draw: at most {MAX_TOKENS}"
            )
        maps = attention_maps(reader.load_encoder(folder, pooler=False), encoded.windows[0])
        layers = choose("--layer", arguments.layer, maps.shape[0])
        heads = choose("--head", arguments.head, maps.shape[1])
    except ValueError as error:
        parser.error(str(error))
    tokens = [cut.tokenizer.id_to_token(i) for i in encoded.windows[0].input_ids]
    chosen = maps[[layer - 1 for layer in layers]][:, [head - 1 for head in heads]]
    title = " / ".join(filter(None, (arguments.text, arguments.pair)))
    draw(chosen, tokens, title, layers, heads).savefig(arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
