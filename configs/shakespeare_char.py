"""A causal model of Shakespeare's characters, with the sizes and steps of nanoGPT's recipe for a CPU.

python launch.py --config configs/shakespeare_char.py
86-93 s on two cores: 1.763, 1.763, 1.755 nats per held-out character (seeds 0-2).
Published results of nanoGPT: 1.898, 1.903 (not measured here).
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.text.update(source="tinyshakespeare", tokenizer="characters")
    config.model.bias = "none"
    config.train.update(steps=2000, batch_size=12, evaluate_every=1000)
    return config
