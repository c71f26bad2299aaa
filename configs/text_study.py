"""Does a language model need to train its embedding? Two arms x 3 seeds on the docstrings of Python.

python launch.py --config configs/text_study.py --workdir runs/text
270 s on two busy cores. Nats per held-out byte: usual 2.845, fixed_embedding 2.875.
The fixed embedding is worse by 0.024 to 0.036 (95 % interval).
"""

from configs import base


def get_config():
    config = base.get_config("ablation", of="language")
    arms = [("fixed_embedding", {"optim.frozen": ["embed/E_WD"]}), ("usual", {})]
    config.study.update(arms=arms, seeds=[0, 1, 2])
    config.log = ["tensorboard"]
    config.text.source = "docstrings"
    config.model.update(M=2, D=64)
    config.train.update(steps=300, batch_size=16, evaluate_every=100)
    return config
