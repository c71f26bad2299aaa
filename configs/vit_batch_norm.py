"""Digits once more: batch norm with running statistics (E17), positions concatenated (E21), MLPs of two hidden layers.

python launch.py --config configs/vit_batch_norm.py

Two CPU cores: 15 s with start and compilation. 334 held-out digits, seed 0: 97.3 %.
"""

from configs import base


def get_config():
    config = base.get_config("vision")
    config.model.M = 2
    config.model.D = 64
    config.model.norm = "batch"
    config.model.mlp = "two_hidden_relu"
    config.model.position = "learned_concatenated"
    config.image.shift = 0.5
    config.train.steps = 400
    return config
