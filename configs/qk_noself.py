"""Is one matrix enough on masked text, and after 1,500 steps, if no token attends to itself? Three scores, ten seeds.

python launch.py --config configs/qk_noself.py --workdir runs/qk_noself
132 runs, 72 of them to choose rates, 26 minutes on two cores in two processes. For the next character no difference
between tied_noself and two matrices is found (-0.007 to +0.007 nats); for masked ones tied_noself is worse by 0.316
(0.059 to 0.573): docs/qk_results.md. The model, training and conditions are those of qk_ablation.py, here with three
tuning seeds and interpolated rates.
"""

from configs import qk_ablation

SCORES = ["tied", "tied_noself", "asymmetric"]


def get_config():
    config = qk_ablation.get_config()
    config.study.arms = [(score, {"model.score": score}) for score in SCORES]
    config.study.tune_seeds = [1000, 1001, 1002]
    return config
