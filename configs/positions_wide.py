"""Is the learning rate at the end of its range? positions.py from 0.001 to 0.03, and smaller sinusoids.

python launch.py --config configs/positions_wide.py --workdir runs/positions_wide
660 runs, 360 of them to choose rates; not run yet. Six kinds of positions, ten seeds, three tuning seeds, interpolated
rates. `scaled` are sinusoids as large as the embeddings. docs/positions.md has the results.
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
