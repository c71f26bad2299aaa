"""Llama weights in the form of https://github.com/karpathy/llama2.c (its first version, which has no magic number).

Seven little-endian int32, then float32 values in the order of the layout below. Nothing but the size of the file tells
that it is one, so the seven numbers must account for every byte.
"""

import math
import os
import pathlib
from typing import Any

import numpy as np

from experiments.engine import errors
from experiments.pretrained import safetensors

HEADER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
HEADER += ("vocab_size", "max_position_embeddings")
FIXED = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0}  # not in the file: llama2.c knows no others
UNUSED = "unused"  # cosines and sines of the positions, which every reader computes for itself


def read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(settings, tensors) of the model in the file, by the names that transformers gives them; tensors are
    memory-mapped, read-only float32. The rotary position turns the pairs (2i, 2i+1) of features here, and not
    (i, i + K/2), for which transformers orders the rows of its q_proj and k_proj.

    UserError: no such file; one that is not of this form, which is then taken for a file of pickles.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise errors.UserError(f"{path} is not there, or not a file")
    try:
        header = np.fromfile(path, "<i4", len(HEADER)).tolist()
        numbers = path.stat().st_size / 4 - len(HEADER)
        D, F, M, H, G, W, N = header if len(header) == len(HEADER) else [0] * len(HEADER)
        tied, W = W > 0, abs(W)  # a negative size says that the output has a matrix of its own
        if min(D, F, M, H, G, W, N) < 1 or D % (2 * H) or H % G:  # the rotary position needs an even K = D / H
            raise safetensors.refusal(path)
        K, layer = D // H, "model.layers.{}."
        shapes = {  # in this order; a name with {} stands for the tensors of all M layers
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
            UNUSED: (2, N, K // 2),
            **({} if tied else {"lm_head.weight": (W, D)}),
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        if numbers != sum(sizes):
            raise safetensors.refusal(path)
        values = np.asarray(np.memmap(path, "<f4", mode="r", offset=4 * len(HEADER)))
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error
    tensors = {}
    for (name, shape), part in zip(shapes.items(), np.split(values, np.cumsum(sizes)[:-1]), strict=True):
        if "{}" in name:
            tensors |= {name.format(m): tensor for m, tensor in enumerate(part.reshape(shape))}
        elif name != UNUSED:
            tensors[name] = part.reshape(shape)
    settings = dict(zip(HEADER, (D, F, M, H, G, W, N), strict=True))
    return settings | FIXED | {"tie_word_embeddings": tied}, tensors
