"""The scores by name, their parameters, and which of them are symmetric."""

import cases

from experiments.engine import by_name
from tfm.attention import score

SCORES = by_name.candidates(score)
H, K = 3, 5
D = H * K  # what `identity_query` asks for
SYMMETRIC = {"none", "tied", "tied_wide", "tied_signed", "pairwise_sym", "l2_tied"}
TURNED = SYMMETRIC - {"tied_signed", "pairwise_sym", "l2_tied"}  # symmetric also behind rotary positions


def drawn(name: str, bias: bool = True, **sizes: int) -> dict:
    """Draw the parameters of a score as normal numbers."""
    return cases.drawn(lambda key: SCORES[name].init(key, **dict(H=H, K=K, D=D) | sizes, bias=bias))
