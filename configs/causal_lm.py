"""The next byte of Python's own standard library: a causal language model that needs no download.

python launch.py --config configs/causal_lm.py

Two CPU cores: 156 s with start and compilation. Held-out modules of Python 3.11, seed 0: 1.720 nats per byte, 54.4 %
right (always guessing the most frequent byte: 28.4 %).
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.text.N = 128
    config.train.steps = 1000
    config.train.batch_size = 16
    config.train.evaluate_every = 500
    config.sample.prompt = "def "
    return config
