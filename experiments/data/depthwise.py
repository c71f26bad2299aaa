"""Depthwise convolutions of images in numpy: every pixel row (and channel) has its own kernel over the columns.

y_{n,d} = sum_h kernel_{h,d} x_{n+o_h,d}: token n holds the D pixels of column n, one for each row and channel. Beyond
the edges, the first and the last column repeat.
"""

import numpy as np

from experiments.engine import batches


def offsets(H: int) -> np.ndarray:
    """Return o_h, the offset from a token to the token that head h reads: -2 ... 2 for H = 5, -2 ... 1 for H = 4."""
    return np.arange(H) - H // 2


def columns(image_BYXZ: np.ndarray) -> np.ndarray:
    """Return x_BND: token n is pixel column n, and its features are the pixels of that column."""
    B, Y, X, Z = image_BYXZ.shape
    return image_BYXZ.swapaxes(1, 2).reshape(B, X, Y * Z)


def pad(x_BND: np.ndarray, H: int) -> np.ndarray:
    """Repeat the first token H // 2 times before it, and the last token (H - 1) // 2 times after it."""
    return np.pad(x_BND, [(0, 0), (H // 2, (H - 1) // 2), (0, 0)], mode="edge")


def convolve(x_BND: np.ndarray, kernel_HD: np.ndarray) -> np.ndarray:
    """Return y_{n,d} = sum_h kernel_{h,d} x_{n+o_h,d} (float32), the targets of the convolution experiment.

    o_h = h - H // 2 (`offsets`). Beyond the edges, the first and the last token repeat.
    """
    x_BNDH = np.lib.stride_tricks.sliding_window_view(pad(x_BND, len(kernel_HD)), len(kernel_HD), axis=1)
    return np.einsum("bndh,hd->bnd", x_BNDH, kernel_HD).astype(np.float32)


def convolve_by_numpy(x_BND: np.ndarray, kernel_HD: np.ndarray) -> np.ndarray:
    """Return the y_BND of `convolve` in float64, by numpy.convolve. That reverses kernels, so it gets reversed ones."""
    y_BND = np.zeros(x_BND.shape)
    padded_BND = pad(x_BND.astype(np.float64), len(kernel_HD))
    for b, d in np.ndindex(len(x_BND), x_BND.shape[2]):
        y_BND[b, :, d] = np.convolve(padded_BND[b, :, d], kernel_HD[::-1, d], "valid")
    return y_BND


def examples(fetch: batches.Fetch, kernel_HD: np.ndarray) -> batches.Fetch:
    """Return a `fetch` of the images' pixel columns x_BND, their convolution target_BND, and weight_BN = 1."""

    def fetch_columns(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        x_BND = columns(fetch(index_B, rng)["image_BYXZ"])
        weight_BN = np.ones(x_BND.shape[:2], np.float32)
        return {"x_BND": x_BND, "target_BND": convolve(x_BND, kernel_HD), "weight_BN": weight_BN}

    return fetch_columns
