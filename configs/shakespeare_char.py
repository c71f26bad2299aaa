"""draft"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "language"
    config.text.source = "tinyshakespeare"
    config.text.tokenizer = "characters"
    config.model.bias = False
    config.train.steps = 2000
    config.train.batch = 12
    config.train.evaluate_every = 1000
    return config
