"""Spanish from English: 102,786 pairs of sentences of at most 15 subwords, read about twice.

python launch.py --config configs/translation.py
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "translation"
    config.pairs.N = 16
    config.model.M = 2
    config.optim.learning_rate = 2e-3
    config.optim.warmup_steps = 200
    config.train.steps = 6000
    config.train.batch = 32
    config.train.evaluate_every = 2000
    return config
