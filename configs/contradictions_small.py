"""The arms of contradictions.py on characters of Shakespeare: the speedrun's model and rates, ten seeds, 170 runs.

python launch.py --config configs/contradictions_small.py --workdir runs/contradictions_small
With five seeds 25 minutes on two busy cores; ten were not run yet. Claims and results: docs/contradictions.md.
"""

from configs import base, contradictions, shakespeare_speedrun


def get_config():
    config = base.get_config("ablation", of=shakespeare_speedrun.get_config())
    config.study.update(arms=contradictions.arms(config.model.F), seeds=[*range(10)])
    config.log = ["tensorboard"]
    config.model.output_std = 1.0  # hyperball keeps the norms of matrices, which zeros have not
    config.train.update(log_every=50, evaluate_every=200)
    return config
