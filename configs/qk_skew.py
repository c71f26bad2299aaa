"""How much direction does attention need? Scores U'U plus a skew form of rank r, on a ring and on induction; ten seeds.

python launch.py --config configs/qk_skew.py --workdir runs/qk_skew
The ring has one head in one layer, where a skew part of rank 2 is enough in principle (docs/ring.md). Induction has
two layers of four heads and learned or rotary positions. r = 0 is `tied`. 342 runs, 162 of them to choose rates.
Accuracy in %, mean of ten seeds, for r = 0, 2, 4, 8, 16 and two matrices: ring 72.0, 80.9, 84.1, 89.7, 93.7, 100;
induction with learned positions 89.4, 95.6, 98.5, 100.0, 94.9, 100.0, with rotary ones 53.0, 77.1, 57.2, 42.2, 42.7,
98.8 (docs/study_results.md).
"""

from configs import base, induction

RANKS = [0, 2, 4, 8, 16]
RING = {"synthetic.task": "ring", "model.M": 1, "model.H": 1, "model.position": "learned", "train.steps": 300}


def get_config():
    config = base.get_config("ablation", of=induction.get_config())
    config.study.arms = [[f"skew_{r}", {"model.score": f"sym_plus_skew:{r}"}] for r in RANKS]
    config.study.arms += [["asymmetric", {"model.score": "asymmetric"}]]
    config.study.conditions = [["ring", RING]]
    config.study.conditions += [["learned", {"model.position": "learned"}]]
    config.study.conditions += [["rotary", {"model.relative_position": "rotary:100"}]]
    config.study.update(metric="eval/accuracy", seeds=[*range(10)], tune_seeds=[1000, 1001, 1002])
    config.study.tune = [["optim.learning_rate", [1e-3, 3e-3, 1e-2]]]
    config.model.relative_position = "none"
    config.log = []
    config.train.update(steps=600, log_every=50, evaluate_every=100)
    return config
