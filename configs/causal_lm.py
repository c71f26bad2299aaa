"""The next byte of Python's own standard library: a causal language model that needs no download.

python launch.py --config configs/causal_lm.py

Two CPU cores: a few minutes; its result has not been measured on a quiet machine yet.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "language"
    config.text.N = 128
    config.train.steps = 1000
    config.train.batch = 16
    config.train.evaluate_every = 500
    config.sample.prompt = "def "
    return config
