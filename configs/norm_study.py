"""A study of the kind and place of norms: three blocks x 5 seeds on handwritten digits.

python launch.py --config configs/norm_study.py --workdir runs/norm
154 s on two busy cores: no arm differs significantly from pre_norm.
95 % intervals in nats: post_norm from 0.053 better to 0.058 worse, rms from 0.032 better to 0.034 worse.
"""

from configs import base


def get_config():
    config = base.get_config("ablation", of="vision")
    config.study.arms = [("post_norm", {"model.block": "post_norm"}), ("rms", {"model.norm": "rms"}), ("pre_norm", {})]
    config.study.threshold = 0.2
    config.model.D = 64
    config.image.augment = ["shift:0.5"]
    config.train.update(steps=500, evaluate_every=100)
    return config
