"""The scores by name, random parameters for them, and the names of the symmetric ones."""

import cases

from experiments.config import by_name
from tfm.attention import score

SCORES = by_name.candidates(score)
H, K = 3, 5
D = H * K  # `identity_query` requires D = H * K
SYMMETRIC = {"none", "tied", "tied_wide", "tied_signed", "pairwise_sym", "l2_tied"}
SYMMETRIC_WITH_ROTARY = SYMMETRIC - {"tied_signed", "pairwise_sym", "l2_tied"}  # also symmetric with rotary positions


def draw_params(name: str, bias: bool = True, **sizes: int) -> dict:
    """Draw the parameters of a score as normal numbers."""
    return cases.draw_params(lambda key: SCORES[name].init(key, **dict(H=H, K=K, D=D) | sizes, bias=bias))
