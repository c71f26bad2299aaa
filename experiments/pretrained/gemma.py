"""The first Gemma (Gemma Team 2024): a Llama with GELU gates, embeddings times sqrt(D), and gains 1 + g in norms."""

import functools

import numpy as np

from experiments.pretrained import families, llama, tensors

GATED = {"gelu_pytorch_tanh": "geglu_tanh"} | llama.GATED | {"gelu": "geglu_tanh"}  # Gemma's gelu is the tanh form
FIXED = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False, "sliding_window": None}


def rescale(
    arrays: tensors.Arrays, settings: families.Settings, family: families.Family, *, back: bool = False
) -> tensors.Arrays:
    """Return the tensors with 1 added to the gains of norms, and the embedding times sqrt(D). back: the inverse.

    If the embedding is also the output, the last gain is divided by sqrt(D), so that logits stay the same.
    """
    factor, changed = np.float32(settings["D"] ** 0.5), {}
    for name, array in arrays.items():
        array = np.asarray(array, np.float32)
        if name == "embed_tokens.weight":
            changed[name] = array * (1 / factor if back else factor)
        elif name.endswith("norm.weight"):
            divisor = factor if name == "norm.weight" and settings["tied_output"] else np.float32(1)
            changed[name] = array * divisor - 1 if back else (1 + array) / divisor
    return {**arrays, **changed}


FAMILY = llama.FAMILY._replace(
    architecture="Gemma",
    sizes=families.sizes(M=28, D=3072, H=16, F=24576, W=256000, N=8192),
    choices={"mlp": ("hidden_act", GATED), "tied_output": ("tie_word_embeddings", families.TRUE)},
    read=functools.partial(llama.read, G=16, K=256, fixed=FIXED),
    clean=rescale,
    restore=functools.partial(rescale, back=True),
)
