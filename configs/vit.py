"""draft"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "vision"
    config.model.M = 4
    config.model.D = 64
    config.image.shift = 1
    config.optim.learning_rate = 2e-3
    config.train.steps = 1500
    config.train.batch = 64
    config.train.evaluate_every = 300
    return config
