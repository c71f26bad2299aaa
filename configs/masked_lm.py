"""Hidden bytes (15 %) of the English in Python's standard library, from both sides: masked language without a download.

python launch.py --config configs/masked_lm.py

Two CPU cores: 248 s with start and compilation. Held-out modules of Python 3.11, seed 0: 55.5 % of the hidden bytes
(always guessing the most frequent one: 16.8 %).
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.bias = False
    config.text.source = "docstrings"
    config.text.objective = "masked"
    config.optim.learning_rate = 2e-3
    config.train.steps = 3000
    config.train.batch_size = 24
    config.train.evaluate_every = 1000
    config.train.save_every = 1000
    return config
