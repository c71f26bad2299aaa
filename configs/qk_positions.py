"""Does the cost of one matrix depend on positions? Seven scores x five kinds of positions on Shakespeare, ten seeds.

python launch.py --config configs/qk_positions.py --workdir runs/qk_positions
770 runs, 420 of them to choose rates; 75 minutes, two processes beside other work. tied costs 0.27 nats per character
with learned positions and 0.17 with rotary ones. tied_noself is never shown to be worse (docs/qk_results.md). The study
separates the cost of attending to oneself (with and without _noself), of parameters (qk_matched.py) and of direction
(sym_plus_skew:2, pairwise). The two arms sym_plus_skew:2_noself and asymmetric_noself were added after some rates had
been tried, and before any verdict was read.
"""

from configs import base

SCORES = ["tied", "sym_plus_skew:2", "pairwise", "tied_noself", "sym_plus_skew:2_noself", "asymmetric_noself"]
SCORES += ["asymmetric"]
POSITIONS = {
    "learned": {"model.position": "learned"},
    "rotary": {"model.relative_position": "rotary"},
    "buckets": {"model.relative_position": "buckets"},
    "alibi": {"model.relative_position": "alibi"},
    "none": {},
}


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.arms = [(score.replace(":", "_"), {"model.score": score}) for score in SCORES]
    config.study.conditions = [*POSITIONS.items()]
    config.study.update(seeds=[*range(10)], tune_seeds=[1000, 1001, 1002])
    config.study.tune = [["optim.learning_rate", [1e-3, 3e-3, 1e-2, 3e-2]]]
    config.text.update(source="tinyshakespeare", tokenizer="characters")
    config.model.update(M=2, D=64, H=2, position="none")
    config.train.update(steps=500, batch_size=16, log_every=50)
    return config
