"""A study of learning rate and weight decay: five arms x 5 seeds on handwritten digits, in one compiled program.

python launch.py --config configs/learning_rate_study.py --workdir runs/rate
436 s on two busy cores: no arm differs significantly from the learning rate 0.001.
The widest joint 95 % interval is that of 0.0003: from 0.029 nats better to 0.089 worse.
"""

from configs import base


def get_config():
    config = base.get_config("ablation", of="vision")
    config.study.arms = [(f"{rate:g}", {"optim.learning_rate": rate}) for rate in (3e-4, 3e-3, 1e-2)] + [
        ("no_decay", {"optim.learning_rate": 1e-3, "optim.weight_decay": 0.0}),
        ("0.001", {"optim.learning_rate": 1e-3}),
    ]
    config.model.update(M=2, D=64)
    config.image.augment = ["shift:0.5"]
    config.train.update(steps=1000, evaluate_every=250)
    return config
