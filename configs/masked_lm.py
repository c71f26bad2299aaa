"""draft"""
from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "language"
    config.text.objective = "masked"
    config.text.N = 128
    config.train.steps = 3000
    config.train.batch = 16
    config.train.evaluate_every = 1000
    return config
