"""draft"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "language"
    config.text.N = 128
    config.train.steps = 1000
    config.train.batch = 16
    config.train.evaluate_every = 500
    config.sample.prompt = "def "
    return config
