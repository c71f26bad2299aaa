"""Llama weights in the first file format of https://github.com/karpathy/llama2.c, which has no magic number.

The file has seven little-endian int32, then float32 values in the order of `_layout`. Only the size of the file shows
its format, so the seven numbers must account for every byte.
"""

import math
import os
import pathlib
from typing import Any

import numpy as np

from experiments.engine import disk
from experiments.pretrained import safetensors

HEADER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
HEADER += ("vocab_size", "max_position_embeddings")
FIXED = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0}  # llama2.c always uses these values


def read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return (config.json, tensors) of the model in the file, with transformers' names. The tensors are memory-mapped.

    Rotary positions rotate the pairs (2i, 2i+1) of features here. transformers rotates (i, i + K/2), and has the rows
    of q_proj and k_proj in this order. Raises UserError if the file has another format, such as a file of pickles.
    """
    path = pathlib.Path(path)
    with disk.reading(path):
        header = np.fromfile(path, "<i4", len(HEADER)).tolist()
        numbers = path.stat().st_size / 4 - len(HEADER)
    D, F, M, H, G, W, N = header if len(header) == len(HEADER) else [0] * len(HEADER)
    tied, W = W > 0, abs(W)  # in the file, W < 0 means that the output has another matrix than the embedding
    valid = min(D, F, M, H, G, W, N) > 0 and D % (2 * H) == 0 == H % G  # the rotary position needs an even K = D / H
    layout = _layout(D, F, M, H, G, W, N, tied) if valid else {"": ()}
    ends = np.cumsum([math.prod(shape) for shape in layout.values()])
    if not valid or numbers != ends[-1]:
        raise safetensors.refusal(path)
    values, tensors = np.asarray(np.memmap(path, "<f4", mode="r", offset=4 * len(HEADER))), {}
    for (name, shape), part in zip(layout.items(), np.split(values, ends[:-1]), strict=True):
        stacked = part.reshape(shape)
        tensors |= {name.format(m=m): stacked[m] for m in range(M)} if "{m}" in name else {name: stacked}
    del tensors["unused"]
    return dict(zip(HEADER, (D, F, M, H, G, W, N), strict=True)) | FIXED | {"tie_word_embeddings": tied}, tensors


def _layout(D: int, F: int, M: int, H: int, G: int, W: int, N: int, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name, in the order of the file. {m} stands for the layers, which are the first axis."""
    K, layer = D // H, "model.layers.{m}."
    return {
        "model.embed_tokens.weight": (W, D),
        layer + "input_layernorm.weight": (M, D),
        layer + "self_attn.q_proj.weight": (M, H * K, D),
        layer + "self_attn.k_proj.weight": (M, G * K, D),
        layer + "self_attn.v_proj.weight": (M, G * K, D),
        layer + "self_attn.o_proj.weight": (M, D, H * K),
        layer + "post_attention_layernorm.weight": (M, D),
        layer + "mlp.gate_proj.weight": (M, F, D),
        layer + "mlp.down_proj.weight": (M, D, F),
        layer + "mlp.up_proj.weight": (M, F, D),
        "model.norm.weight": (D,),
        "unused": (2, N, K // 2),  # cosines and sines of the positions, which every reader computes for itself
        **({} if tied else {"lm_head.weight": (W, D)}),
    }
