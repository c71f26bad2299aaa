"""A test of translation on this machine: everything that a run does, with few steps, few subwords and a small model.

python launch.py --config configs/translation_smoke.py
"""

from configs import base


def get_config():
    config = base.get_config("translation")
    config.pairs.vocabulary = 1024
    config.model.update(M=1, D=32)
    config.optim.warmup_steps = 10
    config.train.steps = 100
    return config
