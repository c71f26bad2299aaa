"""The equations of Turner 2023 in general form: scores with one matrix (E5), values with V_h of D x D (E8).

python launch.py --config configs/turner.py
56 s on two cores: 2.410 nats per held-out byte, 33.5 % accuracy (the most frequent byte: 16.3 %).
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.update(score="tied", value="full_rank", mlp="relu", bias="none")
    config.text.source = "docstrings"
    config.optim.learning_rate = 2e-3
    config.train.update(steps=600, batch_size=24)
    return config
