"""Does attention need two matrices? Seven made tasks of twelve tokens, one head in one layer, six scores, five seeds.

python launch.py --config configs/qk_synthetic.py --workdir runs/qk_synthetic

ring, previous, reachability and beats ask who stands before, points to, or beats whom; membership and nearest only who
is alike. These are 42 programs, trained one after the other, but of each score only two are compiled, the second for
previous_causal, which hides later tokens; the other tasks differ in their data alone, and take theirs from the
compilation cache. Two CPU cores: 250 s, 210 runs; the table of accuracies is in docs/qk_results.md.
"""

from configs import base

SCORES = ["none", "tied", "tied_noself", "tied_signed", "pairwise", "asymmetric"]
TASKS = ["ring", "previous", "reachability", "beats", "membership", "nearest"]


def get_config():
    config = base.get_config("ablation", of="synthetic")
    config.study.arms = [[score, {"model.score": score}] for score in SCORES]
    config.study.conditions = [[task, {"synthetic.task": task}] for task in TASKS]
    config.study.conditions.insert(2, ["previous_causal", {"synthetic.task": "previous", "synthetic.causal": True}])
    config.study.metric = "eval/accuracy"
    config.study.threshold = 0.9
    config.model.M = 1
    config.model.H = 1
    config.model.D = 64
    config.optim.learning_rate = 3e-3
    config.optim.warmup_steps = 50
    config.train.steps = 300
    config.train.batch_size = 32
    config.train.evaluate_every = 25
    return config
