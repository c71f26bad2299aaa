"""The best learning rate at four widths, with and without maximal update parametrisation, on tinyshakespeare.

python launch.py --config configs/mup_study.py --workdir runs/mup
Each condition is a width D with (mup_D) or without (plain_D) model.mup = 64. Its arms are seven learning rates, a
factor of 2 apart, and 4e-3 is the reference. docs/guides/widths.md has the results.
"""

from configs import base

RATES = [5e-4, 1e-3, 2e-3, 8e-3, 1.6e-2, 3.2e-2, 4e-3]  # the last is the reference


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.arms = [(f"rate_{rate:g}", {"optim.learning_rate": rate}) for rate in RATES]
    config.study.conditions = [
        (f"{name}_{D}", {"model.D": D, "model.mup": mup})
        for D in (64, 128, 256, 512)
        for name, mup in (("mup", 64), ("plain", 0))
    ]
    config.study.seeds = [0, 1, 2]
    config.text.update(source="tinyshakespeare", tokenizer="characters", N=64)
    config.model.update(M=2, H=4)
    config.train.update(steps=150, batch_size=16, evaluate_every=150)
    config.optim.warmup_steps = 15
    return config
