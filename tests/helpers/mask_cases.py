"""Masks by name, ours and as the paper writes them."""

import numpy as np
import reference
from cases import N, S

from tfm.attention import mask

VALID_BS = np.arange(S)[None, :] < np.array([S, 8])[:, None]  # the second sequence ends with three paddings
VALID_BS[0, 2] = False
MASKS = {"none": None, "causal": mask.causal, "padding": mask.padding(VALID_BS)}
MASKS |= {"both": mask.both(mask.causal, MASKS["padding"])}


def paper_allowed(name: str, b: int):
    """The paper's mask [n', n] of sequence b."""
    if name == "none":
        return None
    allowed = reference.upper_triangular(S, N) if name in ("causal", "both") else np.ones((S, N))
    return allowed * VALID_BS[b][:, None] if name in ("padding", "both") else allowed
