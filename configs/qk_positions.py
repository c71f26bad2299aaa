"""Does the cost of one matrix depend on positions? Five scores x five kinds of positions on Shakespeare, ten seeds.

python launch.py --config configs/qk_positions.py --workdir runs/qk_positions
Not run yet: 550 runs, about three hours of one core. It separates the cost of attending to oneself (tied against
tied_noself), of parameters (qk_matched.py) and of direction (sym_plus_skew:2, pairwise).
"""

from configs import base

SCORES = ["tied", "tied_noself", "sym_plus_skew:2", "pairwise", "asymmetric"]
POSITIONS = {
    "learned": {"model.position": "learned"},
    "rotary": {"model.relative_position": "rotary"},
    "buckets": {"model.relative_position": "buckets"},
    "alibi": {"model.relative_position": "alibi"},
    "none": {},
}


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.arms = [(score.replace(":", "_"), {"model.score": score}) for score in SCORES]
    config.study.conditions = [*POSITIONS.items()]
    config.study.update(seeds=[*range(10)], tune_seeds=[1000, 1001, 1002])
    config.study.tune = [["optim.learning_rate", [1e-3, 3e-3, 1e-2, 3e-2]]]
    config.text.update(source="tinyshakespeare", tokenizer="characters")
    config.model.update(M=2, D=64, H=2, position="none")
    config.train.update(steps=500, batch_size=16, log_every=50)
    return config
