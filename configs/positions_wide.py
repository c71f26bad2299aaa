"""Do rotary positions help small models, with rates from 0.001 to 0.03? Six kinds of positions, ten seeds.

python launch.py --config configs/positions_wide.py --workdir runs/positions_wide
660 runs, 360 of them to choose rates: three tuning seeds, interpolated rates. With learned positions the loss is worse
by 0.16 to 0.22 nats after 300 steps, and by 0.04 after 1,200. The models and trainings are those of positions.py.
`scaled` are sinusoids as large as the embeddings. Results: docs/positions.md.
"""

from configs import positions

KINDS = ["none", "learned", "sinusoidal", "alibi", "rotary"]


def get_config():
    config = positions.get_config()
    arms = dict(config.study.arms)
    scaled = ("scaled", arms["sinusoidal"] | {"model.position": "configs.arms.scaled_sinusoids:scaled"})
    config.study.arms = [scaled, *((kind, arms[kind]) for kind in KINDS)]
    config.study.tune = [["optim.learning_rate", [1e-3, 3e-3, 1e-2, 3e-2]]]
    config.study.update(metric="eval/loss", tune_seeds=[1000, 1001, 1002])
    config.train.metrics = []
    return config
