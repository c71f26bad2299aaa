"""Does a vision transformer need separate query and key matrices? Six scores x 5 seeds on digits of 8 x 8 pixels.

python launch.py --config configs/qk_vit.py --workdir runs/qk_vit
30 runs, 594 s on two busy cores: no arm differs significantly from asymmetric (0.064 nats, 98.2 % accuracy).
The joint 95 % interval of tied is from 0.059 nats better to 0.027 worse.
"""

from configs import base

SCORES = ["none", "tied", "tied_noself", "pairwise", "symmetric_init", "asymmetric"]


def get_config():
    config = base.get_config("ablation", of="vision")
    config.study.arms = [(score, {"model.score": score}) for score in SCORES]
    config.study.threshold = 0.2
    config.model.update(M=2, D=64)
    config.image.augment = ["shift:0.5"]
    config.train.update(steps=1500, evaluate_every=250)
    return config
