"""Does induction need separate query and key matrices? Five scores, with three kinds of positions, five seeds.

python launch.py --config configs/qk_induction.py --workdir runs/qk_induction
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
