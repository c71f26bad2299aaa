"""How much direction does attention need? Scores U'U plus a skew form of rank r, on a ring and on induction; ten seeds.

python launch.py --config configs/qk_skew.py --workdir runs/qk_skew
The ring has one head in one layer, where a skew part of rank 2 is enough in principle (docs/ring.md). Induction has
two layers of four heads and learned or rotary positions. r = 0 is `tied`. 342 runs, not
run yet.
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
