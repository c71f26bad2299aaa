"""Does the gain of two matrices grow with training? 125, 500 and 2,000 steps on Shakespeare, three scores, five seeds.

python launch.py --config configs/qk_tokens.py --workdir runs/qk_tokens
153 runs, 25 minutes, two processes beside other work. tied_noself minus asymmetric: -0.008, -0.053 and +0.001 nats
after 125, 500 and 2,000 steps. The model is that of qk_positions.py with rotary positions, so its runs of 500 steps
are the same. 2,000 steps read two million characters, about two epochs. Each condition has its own rates.
"""

from configs import qk_positions

SCORES = ["tied_noself", "asymmetric_noself", "asymmetric"]


def get_config():
    config = qk_positions.get_config()
    config.study.arms = [(score, {"model.score": score}) for score in SCORES]
    config.study.conditions = [
        (f"steps_{steps}", {"train.steps": steps, "optim.warmup_steps": steps // 5}) for steps in (500, 2000, 125)
    ]
    config.study.seeds = [0, 1, 2, 3, 4]
    config.model.relative_position = "rotary"
    return config
