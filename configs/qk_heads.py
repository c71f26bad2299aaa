"""Does attention need two matrices? A ring of twelve tokens, with 1 to 8 heads in 1 to 3 layers; six scores, ten seeds.

python launch.py --config configs/qk_heads.py --workdir runs/qk_heads
"""

from configs import base

SCORES = ["tied", "tied_noself", "pairwise_sym", "sym_plus_skew:2", "pairwise", "asymmetric"]


def get_config():
    config = base.get_config("ablation", of="synthetic")
    config.study.arms = [[score.replace(":", "_"), {"model.score": score}] for score in SCORES]
    sizes = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 4), (3, 1), (3, 4)]
    config.study.conditions = [[f"layers_{M}_heads_{H}", {"model.M": M, "model.H": H}] for M, H in sizes]
    config.study.update(metric="eval/accuracy", seeds=[*range(10)], tune_seeds=[1000, 1001, 1002])
    config.study.tune = [["optim.learning_rate", [1e-3, 3e-3, 1e-2]]]
    config.model.D = 64
    config.optim.warmup_steps = 50
    config.train.update(steps=300, batch_size=32, evaluate_every=100)
    return config
