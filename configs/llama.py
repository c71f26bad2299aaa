"""Llama's blocks on bytes: RMS norm, rotary positions, gated MLP, no biases (E14 without mean, E21 in the attention).

python launch.py --config configs/llama.py

Two CPU cores: 52 s with start and compilation. Held-out modules of Python 3.11, seed 0: 1.603 nats per byte,
56.0 % right (always guessing the most frequent: 16.3 %).
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.norm = "rms"
    config.model.mlp = "swiglu"
    config.model.F = 344
    config.model.position = "none"
    config.model.relative_position = "rotary"
    config.model.bias = False
    config.text.source = "docstrings"
    config.optim.learning_rate = 2e-3
    config.train.steps = 600
    config.train.batch_size = 24
    return config
