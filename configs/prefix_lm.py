"""A prefix language model of bytes: the first 32 see each other in both directions, the next 32 are predicted.

python launch.py --config configs/prefix_lm.py
73 s on two cores: 2.244 nats per held-out byte, 37.1 % accuracy (the most frequent byte: 16.1 %).
As in T5, the model has buckets of relative positions, a tied output matrix and dropout.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.update(position="none", relative_position="buckets", dropout=0.05)
    config.text.update(source="docstrings", objective="prefix", head="tied")
    config.optim.learning_rate = 2e-3
    config.train.update(steps=600, batch_size=24)
    return config
