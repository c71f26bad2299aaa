"""Which examples are held out: a property of their content, so that no run, seed or file order can change it."""

import hashlib
from collections.abc import Sequence

import numpy as np

from experiments.engine import errors


def held_out(contents: Sequence[bytes], *, share: float) -> np.ndarray:
    """A boolean per content: True for about `share` of the different contents, those with the smallest sha256.

    Equal contents fall on the same side. Neither side is ever empty: where `share` would leave one so, the content with
    the smallest digest is held out, or the one with the largest is kept.

    Raises:
      UserError: fewer than two different contents.
    """
    digest_B = [hashlib.sha256(content).digest()[:8] for content in contents]
    different = sorted(set(digest_B))
    if len(different) < 2:
        raise errors.UserError("there are not two examples that differ, so none can be held out for evaluation")
    bound = int(share * 2**64).to_bytes(8, "big")
    # Held out are the digests below the bound: at least the smallest of all, never the largest.
    bound = min(max(bound, different[1]), different[-1])
    return np.array([digest < bound for digest in digest_B])
