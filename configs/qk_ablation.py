"""Does attention need two matrices? Five scores x 5 seeds, for the next and for hidden characters of Shakespeare.

python launch.py --config configs/qk_ablation.py --workdir runs/qk

Two CPU cores: 730 s, 50 runs. Held-out loss against asymmetric's, 95 % intervals for all four together: causal (1.842
nats) tied +0.113 (+0.084 to +0.143), none +0.598, symmetric_init +0.013 (-0.021 to +0.047); masked (1.911) tied +0.381
(+0.012 to +0.751), none +1.170, symmetric_init +0.058 (-0.156 to +0.272). More of it in docs/qk_results.md.
"""

from configs import base


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.arms = [
        ("none", {"model.score": "none"}),
        ("tied", {"model.score": "tied"}),
        ("symmetric_init", {"model.score": "symmetric_init"}),
        ("asymmetric_std", {"model.score": "asymmetric_std"}),
        ("asymmetric", {"model.score": "asymmetric"}),
    ]
    config.study.conditions = [
        ("causal", {"text.objective": "causal", "study.threshold": 2.0}),
        ("masked", {"text.objective": "masked", "study.threshold": 2.5}),
    ]
    config.text.source = "tinyshakespeare"
    config.text.tokenizer = "characters"
    config.model.M = 2
    config.model.D = 64
    config.model.H = 2
    config.optim.learning_rate = 3e-3
    config.train.steps = 1500
    config.train.batch_size = 16
    config.train.log_every = 50
    config.train.evaluate_every = 250
    return config
