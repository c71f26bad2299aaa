"""draft"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "vision"
    config.model.M = 4
    config.model.D = 64
    config.image.source = "fashion_mnist"
    config.image.patch = 4
    config.image.shift = 1.0
    config.optim.learning_rate = 2e-3
    config.train.steps = 5000
    config.train.batch = 128
    config.train.evaluate_every = 1000
    config.train.save_every = 1000
    return config
