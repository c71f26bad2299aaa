"""Does induction need separate query and key matrices? Five scores, with three kinds of positions, five seeds.

python launch.py --config configs/qk_induction.py --workdir runs/qk_induction
75 runs; each kind of positions takes 9 minutes of processor time. All arms have the learning rate of induction.py.
With rotary positions, mean accuracy in % after 600 steps: tied 37.9, tied_noself 41.1, pairwise_sym 73.0 (and rising),
symmetric_init 100.0, asymmetric 100.0. The last two reach 90 % after 250 to 300 steps.
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
