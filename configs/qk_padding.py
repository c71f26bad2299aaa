"""What does a loss that averages over padding say about one matrix? Two scores, two losses, five seeds.

python launch.py --config configs/qk_padding.py --workdir runs/qk_padding
20 runs, 13 to 17 minutes of one core. Speeches of Shakespeare are padded to 160 tokens (Kayyam et al. 2026: documents
to 2,048), so 57.7 % of the held-out positions are text. Both arms have one learning rate, which was not tuned.
Nats after 500 steps, and differences with joint 95 % intervals:
padding          metric          tied      asymmetric      difference
in the loss      per position    1.300     1.237           +0.063 (+0.051 to +0.075)
in the loss      per text token  2.251     2.142           +0.109 (+0.089 to +0.129)
masked           per text token  2.248     2.132           +0.116 (+0.083 to +0.150)
The models learn that an end follows an end: a token of padding costs 0.0005 nats. So a mean over positions is 0.577 of
the mean over text, and so is the difference. python -m experiments.tools.verdict runs/qk_padding/runs.csv
--metric=eval/text --better=less prints both losses per text token.
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
