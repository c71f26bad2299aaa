"""What does a loss that averages over padding say about one matrix? Two scores, two losses, five seeds.

python launch.py --config configs/qk_padding.py --workdir runs/qk_padding
"""

from configs import base

SCORES = ["tied", "asymmetric"]
METRICS = "configs.arms.padded:position", "configs.arms.padded:text"


def get_config():
    config = base.get_config("ablation", of="configs.arms.padded")
    config.study.arms = [(score, {"model.score": score}) for score in SCORES]
    config.study.seeds = [*range(5)]
    config.study.conditions = [
        ("padding_in_loss", {"padding.in_loss": True, "study.metric": "eval/position"}),
        ("padding_masked", {"padding.in_loss": False, "study.metric": "eval/text"}),
    ]
    config.text.update(source="configs.arms.padded:read_speeches", tokenizer="characters", N=160)
    config.model.update(M=2, D=64, H=2)
    config.optim.learning_rate = 3e-3
    config.train.update(steps=500, batch_size=16, log_every=50, evaluate_every=250, metrics=[*METRICS])
    return config
