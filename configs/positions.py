"""Do rotary positions help small models? Five kinds of positions and four other techniques, ten seeds.

python launch.py --config configs/positions.py --workdir runs/positions
630 runs in 146 minutes of processor time, 180 to choose rates. docs/positions.md takes the four techniques from here,
and the kinds of positions from positions_wide.py. Three widths have 300 steps; 64 features also have 100 and 1,200. The
study compares rotary positions (the reference) with learned, sinusoidal and ALiBi positions and none; and, all with
rotary positions, dynamic tanh, multi-token prediction, stochastic depth and label smoothing. The metric is the
cross-entropy of the next character, also if another loss is trained.
"""

from configs import base


def get_config():
    config = base.get_config("ablation", of=base.get_config("configs.arms.multi_token"))
    config.study.arms = [
        ("none", {"model.relative_position": "none"}),
        ("learned", {"model.relative_position": "none", "model.position": "learned"}),
        ("sinusoidal", {"model.relative_position": "none", "model.position": "sinusoidal"}),
        ("alibi", {"model.relative_position": "alibi"}),
        ("dynamic_tanh", {"model.norm": "dyt", "model.embed_std": 8.0}),
        ("multi_token", {"targets.later": 0.3}),
        ("stochastic_depth", {"model.block": "configs.arms.stochastic_depth:order"}),
        ("label_smoothing", {"train.loss": "label_smoothing:0.1"}),
        ("rotary", {}),
    ]
    config.study.conditions = [
        (f"D{D}_{steps}", {"model.D": D, "train.steps": steps, "optim.warmup_steps": steps // 10})
        for D, steps in ((32, 300), (64, 300), (128, 300), (64, 100), (64, 1200))
    ]
    config.study.update(seeds=[*range(10)], metric="eval/cross_entropy", tune_seeds=[1000])
    config.study.tune = [["optim.learning_rate", [2e-3, 4e-3, 8e-3, 16e-3]]]
    config.text.update(source="tinyshakespeare", tokenizer="characters")
    config.model.update(M=2, D=64, position="none", relative_position="rotary")
    config.train.update(batch_size=16, log_every=50, metrics=["cross_entropy"])
    return config
