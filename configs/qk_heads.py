"""Does attention need two matrices? A ring of twelve tokens, with 1 to 8 heads in 1 to 3 layers; six scores, ten seeds.

python launch.py --config configs/qk_heads.py --workdir runs/qk_heads
912 runs, 432 of them to choose rates; 70 minutes beside other work. Mean accuracy in %, and how many of ten reach 99 %:
layers x heads   tied        tied_noself  pairwise_sym  sym_plus_skew:2  pairwise, asymmetric
1 x 1            62.4 (0)    85.6 (0)     87.2 (0)      80.9 (0)         100 (10)
1 x 2            80.8 (0)    92.0 (3)     95.2 (5)      92.9 (3)         100 (10)
1 x 4            94.5 (5)    96.8 (6)     100.0 (10)    100 (10)         100 (10)
1 x 8            100 (10)    99.3 (9)     100.0 (10)    100 (10)         100 (10)
2 x 1            98.4 (8)    84.4 (0)     90.6 (3)      99.2 (9)         100 (10)
2 x 4            100.0 (10)  99.2 (9)     100.0 (10)    100 (10)         100 (10)
3 x 1            100.0 (10)  87.2 (1)     95.6 (5)      99.7 (9)         100 (10)
3 x 4            100 (10)    99.9 (9)     100 (10)      100 (10)         100 (10)
The rates are those of the grid: the study was trained before rates were interpolated.
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
