"""A study of chance: 101 seeds of shakespeare_speedrun.py, and the same seeds at half the learning rate.

python launch.py --config configs/search_noise.py --workdir runs/search_noise
202 runs in one program; 44 minutes with --config.mesh.seed=2 on two busy cores (63 minutes of processor time).
1.8552 nats, SD 0.0108; half the rate is worse by 0.0234 nats (95 % interval 0.0217 to 0.0250).
docs/search_noise.py replays searches on these losses: docs/search_noise.md.
"""

from configs import base, shakespeare_speedrun


def get_config():
    config = base.get_config("ablation", of=shakespeare_speedrun.get_config())
    config.study.arms = [("half_the_rate", {"optim.learning_rate": 1e-2}), ("start", {})]
    config.study.seeds = [*range(101)]
    config.log = []  # 202 runs need no symmetry and no TensorBoard events
    config.train.update(evaluate_every=250, log_every=50)
    return config
