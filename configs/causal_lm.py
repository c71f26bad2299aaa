"""A causal language model of bytes, trained on the source code of Python's standard library, without a download.

python launch.py --config configs/causal_lm.py
156 s on two cores: 1.720 nats per held-out byte, 54.4 % accuracy (the most frequent byte: 28.4 %).
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.text.N = 128
    config.train.update(steps=1000, batch_size=16, evaluate_every=500)
    return config
