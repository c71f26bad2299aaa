"""Turner 2023 with symmetric scores: one matrix U in each head (E5), values with V_h of D x D (E8), no biases.

python launch.py --config configs/turner.py
56 s on two cores: 2.410 nats per held-out byte, 33.5 % accuracy (the most frequent byte: 16.3 %).
The general form has two matrices, U_q and U_k (E6): add --config.model.score=asymmetric.
Logits are scaled by 1/sqrt(K), which Turner 2023 absorbs in U.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.update(score="tied", value="full_rank", mlp="relu", bias="none")
    config.text.source = "docstrings"
    config.optim.learning_rate = 2e-3
    config.train.update(steps=600, batch_size=24)
    return config
