"""Our record on Shakespeare's characters in one minute on two CPU cores, from the shell to the result.

python launch.py --config configs/shakespeare_minute.py
Seeds 0-4: 1.596, 1.597, 1.597, 1.602, 1.596 nats; 51 to 54 s cold: docs/records.md.
It is shakespeare_speedrun.py with three wider layers and more steps, which were the first that were tried.
"""

from configs import shakespeare_speedrun


def get_config():
    config = shakespeare_speedrun.get_config()
    config.model.update(M=3, D=96, H=3, F=128, norm="rms")
    config.optim.learning_rate = 1e-2
    config.train.update(steps=1800, log_every=50)
    return config
