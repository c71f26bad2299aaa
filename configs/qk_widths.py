"""Does the gain of two matrices grow with width? 32 to 256 features on Shakespeare, three scores, five seeds.

python launch.py --config configs/qk_widths.py --workdir runs/qk_widths
60 runs, 20 minutes, two processes beside other work. tied_noself minus asymmetric: -0.046, -0.053, -0.070 and -0.074
nats with 32, 64, 128 and 256 features, asymmetric_noself -0.057, -0.048, -0.064 and -0.069. The model is that of
qk_positions.py with rotary positions, and the rates are those that it chose at 64 features. With maximal update
parametrisation they should suit the other widths.
"""

from configs import qk_positions

RATES = {"tied_noself": 6.51e-3, "asymmetric_noself": 6.99e-3, "asymmetric": 5.27e-3}  # qk_positions, rotary


def get_config():
    config = qk_positions.get_config()
    config.study.arms = [(score, {"model.score": score, "optim.learning_rate": rate}) for score, rate in RATES.items()]
    config.study.conditions = [(f"D{D}", {"model.D": D}) for D in (64, 32, 128, 256)]
    config.study.update(seeds=[0, 1, 2, 3, 4], tune=[])
    config.model.update(relative_position="rotary", mup=64)
    return config
