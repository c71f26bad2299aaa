"""Which word stands before mine, on a ring of twelve tokens? One head in one layer, without a mask.

python launch.py --config configs/synthetic.py

Two CPU cores: 9-13 s with start and compilation. 512 held-out rings, seeds 0-2: all three 100.0 % right (always giving
the most frequent word: 4.6 %). With --config.model.score=tied: 68.1, 68.2, 76.3 %.
"""

from configs import base


def get_config():
    config = base.get_config("synthetic")
    config.model.M = 1
    config.model.H = 1
    config.model.D = 64
    config.optim.learning_rate = 3e-3
    config.optim.warmup_steps = 50
    config.optim.weight_decay = 0.0
    config.train.steps = 300
    config.train.batch_size = 32
    config.train.evaluate_every = 50
    return config
