"""A study of the size of a head: H x K = D = 128 with K = 16, 32, 64 and 128 on characters of Shakespeare, five seeds.

python launch.py --config configs/head_study.py --workdir runs/heads
20 runs, 1,169 s on two busy cores. Loss relative to K = 64 (1.947 nats), with joint 95 % intervals:
K = 16 -0.019 (-0.032 to -0.007), 32 -0.025 (-0.048 to -0.002), 128 +0.043 (+0.006 to +0.079).
"""

from configs import base


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.arms = [(f"K_{128 // H}", {"model.H": H}) for H in (8, 4, 1, 2)]
    config.study.seeds = [*range(5)]
    config.text.update(source="tinyshakespeare", tokenizer="characters")
    config.model.update(M=2, position="none", relative_position="rotary")
    config.train.update(steps=500, batch_size=32, evaluate_every=250)
    return config
