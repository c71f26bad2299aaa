"""Does attention need separate query and key matrices? Six scores x seven synthetic tasks, with one head, five seeds.

python launch.py --config configs/qk_synthetic.py --workdir runs/qk_synthetic
210 runs, 250 s on two cores. The accuracies are in docs/qk_results.md.
The tasks ring, previous, reachability and beats need the direction between tokens. membership and nearest need only
their similarity.
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
