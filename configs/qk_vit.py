"""Does a vision transformer need two matrices? Six scores x 5 seeds on handwritten digits (scikit-learn's, 8 x 8).

python launch.py --config configs/qk_vit.py --workdir runs/qk_vit

Two CPU cores: 594 s beside other work, 30 runs. Held-out loss against asymmetric's (0.064 nats, 98.2 %): no difference
was found; for tied it lies between 0.059 better and 0.027 worse (95 % for all five together). The settings are nearly
vit's, which were chosen on the same images.
"""

from configs import base


def get_config():
    config = base.get_config("ablation", of="vision")
    config.study.arms = [
        (name, {"model.score": name})
        for name in ("none", "tied", "tied_noself", "pairwise", "symmetric_init", "asymmetric")
    ]
    config.study.threshold = 0.2
    config.model.M = 2
    config.model.D = 64
    config.image.shift = 0.5
    config.train.steps = 1500
    config.train.evaluate_every = 250
    return config
