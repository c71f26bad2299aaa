"""The task ring: predict the token before each token, on a ring of twelve tokens, with one head in one layer.

python launch.py --config configs/synthetic.py
9-13 s on two cores, seeds 0-2: 100.0 % accuracy (the most frequent token: 4.6 %).
With --config.model.score=tied: 68.1, 68.2, 76.3 %.
"""

from configs import base


def get_config():
    config = base.get_config("synthetic")
    config.model.update(M=1, H=1, D=64)
    config.optim.update(learning_rate=3e-3, warmup_steps=50, weight_decay=0.0)
    config.train.update(steps=300, batch_size=32, evaluate_every=50)
    return config
