"""Which patches of an image are hidden from the model, and asked of it."""

import numpy as np

from experiments.engine import batches, errors


def examples(fetch: batches.Fetch, *, N: int, share: float, seed: int = 0) -> batches.Fetch:
    """The images of `fetch`, each with a random set of round(share * N) of its N patches hidden.

    Gives `image_BYXZ` as it is, `hidden_BN` (bool), and `weight_BN`, 1 where a patch is hidden and 0 elsewhere
    (float32). With an `rng` (training) the set is new each time; without one (evaluation) it depends on `seed` and the
    example's number only. Leave `seed` alone, and every run is asked the same.

    Raises:
      UserError: a share that hides no patch or all of them.
    """
    count = round(share * N) if 0 <= share <= 1 else 0
    if not 0 < count < N:
        raise errors.UserError(
            f"of {N} patches at least one must be hidden and one be seen: image.mask_ratio = {share} does not suit"
        )

    def fetch_hidden(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        image_BYXZ = fetch(index_B, rng)["image_BYXZ"]
        hidden_BN = _uniforms(index_B, rng, N=N, seed=seed).argsort(axis=-1).argsort(axis=-1) < count
        return {"image_BYXZ": image_BYXZ, "hidden_BN": hidden_BN, "weight_BN": hidden_BN.astype(np.float32)}

    return fetch_hidden


def _uniforms(index_B: np.ndarray, rng: np.random.Generator | None, *, N: int, seed: int) -> np.ndarray:
    """A number in [0, 1) for each of BN patches: without `rng`, a function of (seed, example) alone."""
    if rng is not None:
        return rng.random((len(index_B), N))
    return np.stack([np.random.Generator(np.random.Philox(key=[seed, index])).random(N) for index in index_B.tolist()])
