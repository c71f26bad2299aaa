"""draft"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "vision"
    config.model.M = 2
    config.model.D = 64
    config.image.shift = 0.5
    config.optim.warmup_steps = 50
    config.train.steps = 5000
    config.train.batch = 64
    config.train.evaluate_every = 1000
    config.train.save_every = 1000
    return config
