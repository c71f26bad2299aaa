"""draft"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "vision"
    config.model.M = 2
    config.model.D = 32
    config.optim.warmup_steps = 10
    config.train.steps = 100
    return config
