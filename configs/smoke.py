"""Everything a run does, on real digits, in a few seconds: does this machine work?

python launch.py --config configs/smoke.py

Two CPU cores: 8 s with start and compilation. 334 held-out digits, seed 0: 85.3 %.
"""

from configs import base


def get_config():
    config = base.get_config("vision")
    config.model.M = 2
    config.model.D = 32
    config.optim.warmup_steps = 10
    config.train.steps = 100
    return config
