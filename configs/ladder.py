"""The ladder: the transformer on tinyshakespeare, one element of Turner 2023 at a time; twelve rungs x 5 seeds.

python launch.py --config configs/ladder.py --workdir runs/ladder
240 runs, 180 of them to choose rates; 16 minutes, two processes. Nats per character: each token alone 2.487, without
residual connections 2.632, without positions 2.332, with learned ones 2.012, with rotary ones 1.948. docs/ladder.md has
all rungs; docs/ladder.py draws them.
"""

import itertools
import operator

import jax.numpy as jnp

from configs import base
from tfm import variant

# What each rung adds to the one below it. The first changes the defaults of base.py.
RUNGS = {
    "alone": {
        "model.window": 1,  # a token attends to itself alone: p(next character | this character)
        "model.score": "none",
        "model.value": "identity",
        "model.H": 1,
        "model.mlp": "configs.ladder:no_mlp",
        "model.block": "plain",
        "model.norm": "none",
        "model.outer_norm": "none",
        "model.position": "none",
    },
    "similarity": {"model.window": 0},  # A = softmax(X' X) (E4)
    "one_matrix": {"model.score": "tied"},  # X' U' U X (E5)
    "two_matrices": {"model.score": "asymmetric"},  # X' U_k' U_q X (E6)
    "values": {"model.value": "full_rank"},  # Y = V X A, V of D x D (E8, with one head)
    "heads": {"model.H": 4},  # Y = sum_h V_h X A_h (E8)
    "low_rank": {"model.value": "low_rank"},  # V_h = U_h U_v,h of rank K = 16 (E9)
    "mlp": {"model.mlp": "gelu"},
    "residual": {"model.block": "pre_norm"},
    "norm": {"model.norm": "token", "model.outer_norm": "last"},
    "positions": {"model.position": "learned"},
    "rotary": {"model.position": "none", "model.relative_position": "rotary"},
}
# In place of an MLP: a number for each layer, because blocks need a parameter. The output matrix could do the same.
no_mlp = variant.Variant(lambda key, **sizes: {"gain": jnp.ones(())}, lambda params, x_BND: params["gain"] * x_BND)


def arms():
    """Return the arms of the ladder: each has the changes of all rungs up to its own, in the place of earlier ones."""
    return list(zip(RUNGS, itertools.accumulate(RUNGS.values(), operator.or_), strict=True))


def get_config():
    config = base.get_config("ablation", of="language")
    config.text.update(source="tinyshakespeare", tokenizer="characters", N=64)
    config.model.update(M=2, D=64, bias="none")
    config.study.update(arms=arms(), seeds=[0, 1, 2, 3, 4])
    config.study.update(tune=[["optim.learning_rate", [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]]], tune_seeds=[1000, 1001, 1002])
    config.train.update(steps=600, batch_size=16, log_every=50)
    return config
