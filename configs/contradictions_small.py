"""A study of nine techniques of contradictions.py, with shakespeare_speedrun.py as it was before them: ten seeds.

python launch.py --config configs/contradictions_small.py --workdir runs/contradictions_small
204 runs with four more techniques took 33 minutes on two cores. Each arm has the best of four learning rates.
Loss minus that of `plain`, of the arms that are better: swiglu -0.026, gated -0.025, exclusive -0.010 nats.
Of those thirteen, four are within 0.01 of `plain`, and six are undecided. Claims and results: docs/contradictions.md.
"""

from configs import base, contradictions, shakespeare_speedrun

LEFT_OUT = ("capped_answers", "keys", "one_projection")  # so that the study takes half an hour


def get_config():
    config = base.get_config("ablation", of=shakespeare_speedrun.get_config())
    # The plain model: shakespeare_speedrun.py as it was before this study.
    config.model.update(F=128, mlp="relu", score="asymmetric", value="low_rank")
    config.optim.learning_rate = 1e-2
    config.study.arms = [arm for arm in contradictions.arms(config.model.F) if arm[0] not in LEFT_OUT]
    config.study.update(seeds=[*range(10)], tune_seeds=[1000])
    config.study.tune = [["optim.learning_rate", [5e-3, 1e-2, 2e-2, 4e-2]]]
    config.log = ["tensorboard"]
    config.model.output_std = 1.0  # as measured in docs/contradictions.md; shakespeare_speedrun.py has 0
    config.train.update(steps=300, log_every=50)
    return config
