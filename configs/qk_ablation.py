"""Does attention need two matrices? Seven arms x 10 seeds on causal and masked characters of Shakespeare.

python launch.py --config configs/qk_ablation.py --workdir runs/qk
196 runs, two hours on two busy cores in two processes. Each arm has the best of four learning rates.
Loss relative to asymmetric, with joint 95 % intervals for all twelve:
causal (1.815 nats): tied +0.149 (+0.121 to +0.177), tied_wide +0.166, tied_more_mlp +0.142,
symmetric_init +0.046 (+0.030 to +0.062), none +0.469;
masked (1.908 nats): tied +0.507 (+0.087 to +0.927), tied_wide +0.883, tied_more_mlp +0.474,
symmetric_init +0.086 (-0.057 to +0.228), none +0.941.

Two arms test whether `tied` is only worse because it has fewer parameters and FLOPs than `asymmetric`.
tied_wide has as many parameters, in a matrix of 2 K rows, and 7 % more FLOPs.
tied_more_mlp has the FLOPs of asymmetric, and its parameters plus 64 biases: the MLP has the second matrix's share.
Conclusions: docs/qk_results.md.
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
