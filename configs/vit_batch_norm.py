"""Digits with batch norm (E17), positions concatenated to the patches (E21), and MLPs with two hidden layers.

python launch.py --config configs/vit_batch_norm.py
15 s on two cores: 97.3 % accuracy on 334 held-out digits.
"""

from configs import base


def get_config():
    config = base.get_config("vision")
    config.model.update(M=2, D=64, norm="batch", mlp="two_hidden_relu")
    config.model.position = "learned_concatenated"
    config.image.augment = ["shift:0.5"]
    config.train.steps = 400
    return config
