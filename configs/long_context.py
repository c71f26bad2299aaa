"""Long context: texts of 2,048 bytes, with ALiBi and a sliding window of the last 256 bytes.

python launch.py --config configs/long_context.py
52 s on two cores: 2.637 nats per held-out byte, 28.4 % accuracy (the most frequent byte: 16.3 %).
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.update(M=2, position="none", relative_position="alibi", window=256)
    config.model.update(attention="flash", remat="full")
    config.text.update(source="docstrings", N=2048)
    config.train.update(steps=100, batch_size=2)
    config.optim.update(warmup_steps=20, learning_rate=3e-3)
    return config
