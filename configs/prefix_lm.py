"""32 bytes are read in both directions, the next 32 are predicted; T5's relative buckets, tied output, dropout.

python launch.py --config configs/prefix_lm.py

Two CPU cores: 73 s with start and compilation. Held-out modules of Python 3.11, seed 0: 2.244 nats per byte,
37.1 % right (always guessing the most frequent: 16.1 %).
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.position = "none"
    config.model.relative_position = "buckets"
    config.model.dropout = 0.05
    config.text.source = "docstrings"
    config.text.objective = "prefix"
    config.text.tied_output = True
    config.optim.learning_rate = 2e-3
    config.train.steps = 600
    config.train.batch_size = 24
    config.sample.prompt = "Return the number of "
    config.sample.max_new_tokens = 40
    return config
