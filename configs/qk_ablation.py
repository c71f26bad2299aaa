"""Does attention need two matrices? Seven arms x 10 seeds, for the next and for hidden characters of Shakespeare.

python launch.py --config configs/qk_ablation.py --workdir runs/qk
Or is it that `tied` has fewer parameters and FLOPs than `asymmetric`? tied_wide has as many parameters, in a matrix of
2 K rows, and 7 % more FLOPs; tied_more_mlp has its FLOPs and, but for 64 biases, its parameters, with the second matrix
spent on the MLP. Each arm has the best of three rates. Not run yet as it is now, 182 runs, about 2,700 s as the earlier
ones took; known are five arms x 5 seeds at one rate, 50 runs in 730 s on two cores. Loss against asymmetric's, 95 %
intervals for all eight together: causal (1.842 nats) tied +0.113 (+0.077 to +0.149), none +0.598, symmetric_init +0.013
(-0.028 to +0.054); masked (1.911) tied +0.381 (-0.070 to +0.832), none +1.170, symmetric_init +0.058 (-0.203 to
+0.319). More of it in docs/qk_results.md.
"""

from configs import base

D, F = 64, 256
SCORES = ["none", "tied", "tied_wide", "symmetric_init", "asymmetric_std", "asymmetric"]


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.arms = [(score, {"model.score": score}) for score in SCORES]
    # Of one matrix D^2 numbers are saved in each layer, and a hidden unit of the MLP takes 2 D.
    config.study.arms.insert(3, ("tied_more_mlp", {"model.score": "tied", "model.F": F + D // 2}))
    config.study.seeds = [*range(10)]
    config.study.tune, config.study.tune_seeds = [["optim.learning_rate", [1e-3, 3e-3, 1e-2, 3e-2]]], [1000]
    config.study.conditions = [
        ("causal", {"text.objective": "causal", "study.threshold": 2.0}),
        ("masked", {"text.objective": "masked", "study.threshold": 2.5}),
    ]
    config.text.update(source="tinyshakespeare", tokenizer="characters")
    config.model.update(M=2, D=D, H=2, F=F)
    config.optim.learning_rate = 3e-3
    config.train.update(steps=1500, batch_size=16, log_every=50, evaluate_every=250)
    return config
