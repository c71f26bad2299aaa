"""A study of the choices in shakespeare_speedrun.py: each arm undoes one choice; 3 seeds.

python launch.py --config configs/speedrun_study.py --workdir runs/speedrun_study
All arms train for 225 steps and are evaluated on the whole validation split. All settings except this number of steps
were chosen on other text.
"""

from configs import base, shakespeare_speedrun

ADAMW = {
    "optim.name": "adamw",
    "optim.learning_rate": 3e-3,
    "optim.warmup_steps": 30,
    "optim.clip": 1.0,
    "optim.betas": [0.9, 0.99],
    "optim.muon_lr_multiplier": 20.0,  # AdamW does not use this and momentum: they have their defaults
    "optim.momentum": 0.95,
}


def get_config():
    config = base.get_config("ablation", of=shakespeare_speedrun.get_config())
    config.study.arms = [
        ("adamw", ADAMW),
        ("learned_positions", {"model.position": "learned", "model.relative_position": "none"}),
        ("outputs_not_zero", {"model.output_std": 1.0}),
        ("no_embed_norm", {"model.outer_norm": "last"}),
        ("relu", {"model.mlp": "relu", "model.F": 128}),
        ("no_gate", {"model.value": "low_rank"}),
        ("no_qk_norm", {"model.score": "asymmetric"}),
        ("longer_memory", {"optim.momentum": 0.95, "optim.betas": [0.9, 0.99]}),
        ("half_the_rate", {"optim.learning_rate": 1e-2}),
        ("cosine_warm_up", {"optim.schedule": "cosine", "optim.warmup_steps": 100}),
        ("all", {}),
    ]
    config.study.seeds = [0, 1, 2]
    config.study.threshold = 1.898
    config.train.update(steps=225, evaluate_every=90)
    return config
