"""Thirteen scores x 5 seeds on causal and masked characters of Shakespeare: hours on a GPU or a TPU.

python launch.py --config configs/qk_ablation_full.py --workdir runs/qk_full
Not run yet. Flags change the model of all arms, such as --config.model.value=full_rank,
--config.model.scale='1/sqrt(D)', or --config.model.relative_position=rotary (l2_tied does not support it).
"""

from configs import base

ARMS = """none tied tied_noself tied_keynorm tied_wide tied_signed pairwise pairwise_sym symmetric_init asymmetric_std
identity_query l2_tied asymmetric""".split()


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.arms = [(name, {"model.score": name}) for name in ARMS]
    config.study.conditions = [
        ("causal", {"text.objective": "causal", "study.threshold": 1.7}),
        ("masked", {"text.objective": "masked", "study.threshold": 2.0}),
    ]
    config.text.update(source="tinyshakespeare", tokenizer="characters", N=256)
    config.model.update(M=6, D=256, H=4, dropout=0.2)
    config.train.update(steps=5000, batch_size=64, log_every=50, evaluate_every=250)
    return config
