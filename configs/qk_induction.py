"""Does induction need separate query and key matrices? Five scores, with three kinds of positions, five seeds.

python launch.py --config configs/qk_induction.py --workdir runs/qk_induction
75 runs; each kind of positions takes 8 minutes of processor time. All arms have the learning rate of induction.py.
Mean accuracy in % after 600 steps, and the median step at which 90 % is reached:
                 rotary         learned                        none
tied             37.9           83.9, two of five seeds 61     30.9
tied_noself      41.1           98.6, 186                      29.0
symmetric_init   100.0, 270     100.0, 170                     46.4
pairwise_sym     73.0, rising   98.6, 239                      24.4
asymmetric       100.0, 268     100.0, 174                     25.6
The report calls tied, tied_noself and pairwise_sym worse with rotary positions, and symmetric_init better without
positions; with learned ones it finds no difference, and gives no verdict on tied, whose seeds are in two clusters.
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
