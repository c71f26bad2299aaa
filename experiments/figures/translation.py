"""What translation shows: which words of the source each word of the target looks at."""

import os
from collections.abc import Sequence

import numpy as np
from matplotlib import colors, figure

from experiments.figures import plots


def cross_attention(
    path: str | os.PathLike, *, A_MHNS: np.ndarray, source: Sequence[str], target: Sequence[str]
) -> None:
    """Weights of N target tokens (rows) on S source tokens (columns): the mean over each layer's heads, then the heads.

    At most 32 tokens a side, the last 12 layers and the first 8 heads, said in the title where some are left out.
    ValueError where the numbers of tokens do not fit the weights.
    """
    M, H, N, S = A_MHNS.shape
    if (N, S) != (len(target), len(source)):
        raise ValueError(f"{N} x {S} weights do not fit {len(target)} target and {len(source)} source tokens")
    shown_MHNS = A_MHNS[-plots.MOST_LAYERS :, : plots.MOST_HEADS, : plots.MOST_TOKENS, : plots.MOST_TOKENS]
    names = [[plots.visible(token) for token in some[: plots.MOST_TOKENS]] for some in (target, source)]
    rows, columns = shown_MHNS.shape[0], 1 + shown_MHNS.shape[1]
    size = [max(0.16 * length + 0.3, 1.5) for length in shown_MHNS.shape[2:]]
    sides = max(size[1] * columns + 1.8, 5.4), max(size[0] * rows + 1.6, 2.6)
    drawing = figure.Figure(figsize=sides, layout="compressed")
    panels = drawing.subplots(rows, columns, squeeze=False)
    scale = colors.Normalize(0, max(float(shown_MHNS.max()), 1e-12))
    mean_MNS = A_MHNS[-rows:, :, : len(names[0]), : len(names[1])].mean(1)
    for m, row in enumerate(panels):
        for h, panel in enumerate(row):
            image = panel.imshow(mean_MNS[m] if h == 0 else shown_MHNS[m, h - 1], cmap="Blues", norm=scale)
            panel.set(xticks=[], yticks=[])
            if m == 0:
                panel.set_title("mean of heads" if h == 0 else f"head {h}", fontsize=9)
        row[0].set_yticks(range(len(names[0])), names[0], fontsize=7, **plots.LITERAL)
        row[0].set_ylabel(f"layer {M - rows + m + 1}", fontsize=9)
    for panel in panels[-1]:
        panel.set_xticks(range(len(names[1])), names[1], rotation=90, fontsize=7, **plots.LITERAL)
    drawing.colorbar(image, ax=panels.ravel().tolist(), label="attention weight", shrink=0.8)
    counts = (rows, M, "layers"), (columns - 1, H, "heads"), (len(names[0]), N, "rows"), (len(names[1]), S, "columns")
    cut = [f"{shown} of {whole} {what}" for shown, whole, what in counts if shown < whole]
    left_out = "\n(" + ", ".join(cut) + ")" if cut else ""
    drawing.suptitle(
        f"cross-attention: the token to be written (row)\nlooks at the source (column){left_out}", fontsize=11
    )
    plots.write(drawing, path)
