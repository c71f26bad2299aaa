"""Does attention need two matrices? Seven made tasks of twelve tokens, one head in one layer, six scores, five seeds.

python launch.py --config configs/qk_synthetic.py --workdir runs/qk_synthetic
ring, previous, reachability and beats ask who stands before, points to, or beats whom; membership and nearest only who
is alike. 250 s on two cores, 210 runs: the table of accuracies is in docs/qk_results.md.
"""

from configs import base

SCORES = ["none", "tied", "tied_noself", "tied_signed", "pairwise", "asymmetric"]
TASKS = ["ring", "previous", "previous_causal", "reachability", "beats", "membership", "nearest"]


def get_config():
    config = base.get_config("ablation", of="synthetic")
    config.study.arms = [[score, {"model.score": score}] for score in SCORES]
    config.study.conditions = [[task, {"synthetic.task": task}] for task in TASKS]
    config.study.update(metric="eval/accuracy", threshold=0.9)
    config.model.update(M=1, H=1, D=64)
    config.optim.update(learning_rate=3e-3, warmup_steps=50)
    config.train.update(steps=300, batch_size=32, evaluate_every=25)
    return config
