"""The ladder, read from the top: the whole transformer on tinyshakespeare without one of its elements; ten models.

python launch.py --config configs/leave_one_out.py --workdir runs/leave_one_out
170 runs, 17 minutes, two processes. `whole`, the reference, has every element of Turner 2023 that configs/ladder.py
adds, up to learned positions. Each other arm lacks one of them, or has another in its place. Nats per character that
are lost without attention to other tokens 0.48, residual connections 0.48, positions 0.32, the second matrix 0.20, the
MLP 0.16, values 0.15; with rotary positions 0.06 are gained, and the norm and several heads are undecided
(docs/ladder.md).
"""

import operator
from functools import reduce

from configs import ladder

WHOLE = reduce(operator.or_, [changes for name, changes in ladder.RUNGS.items() if name != "rotary"])
WITHOUT = {
    "no_attention": {"model.window": 1},  # a token attends to itself alone
    "one_matrix": {"model.score": "tied"},
    "no_values": {"model.value": "identity"},
    "one_head": {"model.H": 1},
    "no_mlp": {"model.mlp": "configs.ladder:no_mlp"},
    "no_residual": {"model.block": "plain"},
    "no_norm": {"model.norm": "none", "model.outer_norm": "none"},
    "no_positions": {"model.position": "none"},
    "rotary": ladder.RUNGS["rotary"],
}


def leave_one_out(config):
    """Return the config of a ladder with the arms of this study, and four learning rates with three tuning seeds."""
    config.study.arms = [(name, WHOLE | changes) for name, changes in WITHOUT.items()] + [("whole", WHOLE)]
    config.study.update(tune=[["optim.learning_rate", [1e-3, 3e-3, 1e-2, 3e-2]]], tune_seeds=[1000, 1001, 1002])
    return config


def get_config():
    return leave_one_out(ladder.get_config())
