"""Does induction need separate query and key matrices? Five scores, with three kinds of positions, five seeds.

python launch.py --config configs/qk_induction.py --workdir runs/qk_induction
75 runs; each kind of positions takes 8 minutes of processor time. All arms have the learning rate of induction.py.
Mean accuracy in % after 600 steps, and the steps to 90 % of the first and the last seed (without positions: not run):
                 rotary               learned
tied             37.9                 83.9, two seeds 61
tied_noself      41.1                 98.6, 175 to 275
symmetric_init   100.0, 250 to 300    100.0, 175 to 200
pairwise_sym     73.0, and rising     98.6, 200 to 325
asymmetric       100.0, 250 to 300    100.0, 175 to 225
"""

from configs import base, induction

SCORES = ["tied", "tied_noself", "symmetric_init", "pairwise_sym", "asymmetric"]
POSITIONS = {
    "rotary": {"model.relative_position": "rotary:100"},
    "learned": {"model.position": "learned"},
    "none": {},
}


def get_config():
    config = base.get_config("ablation", of=induction.get_config())
    config.study.arms = [[score, {"model.score": score}] for score in SCORES]
    config.study.conditions = [*POSITIONS.items()]
    config.study.update(metric="eval/accuracy", threshold=0.9)
    config.log = ["symmetry"]  # and the scores of heads
    config.model.relative_position = "none"
    config.train.steps = 600
    return config
