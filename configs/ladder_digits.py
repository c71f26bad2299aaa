"""The ladder of ladder.py on handwritten digits (8 x 8 pixels, 16 patches): twelve rungs x 5 seeds.

python launch.py --config configs/ladder_digits.py --workdir runs/ladder_digits
240 runs, 180 of them to choose rates; 13 minutes, two processes. Nats per digit: each patch alone 2.198, without
residual connections 1.799, without positions 1.032, with learned ones 0.093, with rotary ones 0.225: docs/ladder.md.
"""

from configs import base, ladder


def get_config():
    config = base.get_config("ablation", of="vision")
    config.model.update(M=2, D=64, bias="none")
    config.image.augment = ["shift:0.5"]
    config.study.update(arms=ladder.arms(), seeds=[0, 1, 2, 3, 4])
    config.study.update(tune=[["optim.learning_rate", [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]]], tune_seeds=[1000, 1001, 1002])
    config.train.update(steps=600, log_every=50)
    return config
