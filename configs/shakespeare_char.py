"""The next character of Shakespeare, 2,000 steps of 12 x 64 characters: nanoGPT's recipe for a CPU, in sizes and steps.

python launch.py --config configs/shakespeare_char.py

Two CPU cores: 86-93 s with start and compilation. Whole validation part (111,540 characters, windows of 64), seeds 0-2:
1.763, 1.763, 1.755 nats per character.
Quoted, not measured here: nanoGPT's own recipe reaches 1.898 and 1.903, evaluated so.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.text.source = "tinyshakespeare"
    config.text.tokenizer = "characters"
    config.model.bias = False
    config.train.steps = 2000
    config.train.batch_size = 12
    config.train.evaluate_every = 1000
    return config
