"""Does attention need separate query and key matrices? Seven arms x 10 seeds, causal and masked, on Shakespeare.

python launch.py --config configs/qk_ablation.py --workdir runs/qk
196 runs, two hours on two busy cores in two processes. Each arm has the best of four learning rates.
Loss relative to asymmetric, in nats. The 95 % intervals hold jointly for all twelve comparisons.
                 causal (1.815 nats)           masked (1.908 nats)
tied             +0.149 (+0.121 to +0.177)     +0.507 (+0.087 to +0.927)
tied_wide        +0.166                        +0.883
tied_more_mlp    +0.142                        +0.474
symmetric_init   +0.046 (+0.030 to +0.062)     +0.086 (-0.057 to +0.228)
none             +0.469                        +0.941

Two arms test whether `tied` is only worse because it has fewer parameters and FLOPs than `asymmetric`.
tied_wide has the same number of parameters as `asymmetric`, in one matrix of 2 K rows, and 7 % more FLOPs.
tied_more_mlp has the same FLOPs, because its MLP is larger by the size of one matrix, and 64 fewer parameters (biases).
Conclusions: docs/qk_results.md.
"""

from configs import base

D, F = 64, 256
SCORES = ["none", "tied", "tied_wide", "symmetric_init", "asymmetric_std", "asymmetric"]


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.arms = [(score, {"model.score": score}) for score in SCORES]
    # One matrix less saves D^2 parameters in each layer, and a hidden unit of the MLP has 2 D: D / 2 more units fit.
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
