"""Does induction need two matrices with more heads or layers? Six scores x six sizes with rotary positions, five seeds.

python launch.py --config configs/qk_induction_heads.py --workdir runs/qk_induction_heads
504 runs, 324 of them to choose rates; 80 minutes, two processes beside other work. At every size tied and tied_noself
stay below 66 %, and two matrices have 94 to 100 % on average (docs/study_results.md). The task is that of induction.py,
with 600 steps; qk_heads.py has the same scores on a ring.
"""

from configs import base, induction, qk_heads

SIZES = [(2, 1), (2, 2), (2, 4), (2, 8), (3, 1), (3, 4)]  # layers and heads


def get_config():
    config = base.get_config("ablation", of=induction.get_config())
    config.study.arms = qk_heads.get_config().study.arms
    config.study.conditions = [[f"layers_{M}_heads_{H}", {"model.M": M, "model.H": H}] for M, H in SIZES]
    config.study.update(metric="eval/accuracy", seeds=[*range(5)], tune_seeds=[1000, 1001, 1002])
    config.study.tune = [["optim.learning_rate", [1e-3, 3e-3, 1e-2]]]
    config.log = []
    config.train.update(steps=600, log_every=50, evaluate_every=100)
    return config
