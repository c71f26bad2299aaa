"""A test of the installation: everything that a run does, on handwritten digits, in a few seconds.

python launch.py --config configs/smoke.py
8 s on two cores: 85.3 % accuracy on 334 held-out digits.
"""

from configs import base


def get_config():
    config = base.get_config("vision")
    config.model.update(M=2, D=32)
    config.optim.warmup_steps = 10
    config.train.steps = 100
    return config
