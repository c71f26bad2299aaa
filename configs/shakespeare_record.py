"""Our record on Shakespeare's characters: less than 1.88 nats in the fewest seconds on two CPU cores.

python launch.py --config configs/shakespeare_record.py
It is shakespeare_speedrun.py with two layers in place of four and smaller batches: a step takes a third of the time.
"""

from configs import shakespeare_speedrun


def get_config():
    config = shakespeare_speedrun.get_config()
    config.model.update(M=2, norm="rms")
    config.optim.learning_rate = 1.5e-2
    config.train.update(steps=560, batch_size=8)
    return config
