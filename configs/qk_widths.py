"""Does the gain of two matrices grow with width or training? Eleven sizes on Shakespeare, five seeds.

python launch.py --config configs/qk_widths.py --workdir runs/qk_widths
110 runs, 40 minutes in two processes. Scores: one matrix without attention to oneself (tied_noself), and two. Widths:
32 to 256 features. Steps: 125 to 2,000; 256 features only up to 500. docs/qk_surface.py fits a surface to the
differences. The model is that of qk_positions.py with rotary positions, and the rates are those that it chose at 64
features and 500 steps. With maximal update parametrisation they should suit the other widths; qk_tokens.py tuned them
for each number of steps, and chose 0.0060 to 0.0069.
"""

from configs import qk_positions

RATES = {"tied_noself": 6.51e-3, "asymmetric": 5.27e-3}  # qk_positions, rotary


def get_config():
    config = qk_positions.get_config()
    config.study.arms = [(score, {"model.score": score, "optim.learning_rate": rate}) for score, rate in RATES.items()]
    config.study.conditions = [
        (f"D{D}_steps_{steps}", {"model.D": D, "train.steps": steps, "optim.warmup_steps": steps // 5})
        for steps in (125, 500, 2000)
        for D in (32, 64, 128, 256)
        if (D, steps) != (256, 2000)  # 80 minutes of a core alone
    ]
    config.study.update(seeds=[0, 1, 2, 3, 4], tune=[])
    config.model.update(relative_position="rotary", mup=64)
    return config
