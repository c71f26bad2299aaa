"""Spanish from English: 102,786 pairs of sentences of at most 15 subwords, read about twice.

python launch.py --config configs/translation.py

Needs spa-eng.zip in $TFM_DATA, and pip install -e ".[text]". Two CPU cores: 435 s with start, compilation and the
decoding of 500 held-out sentences (of different sources), seed 0: chrF 50.5 and BLEU 30.9 with a beam of 4, 48.6 and
28.7 greedily; 68.1 % of held-out subwords right. (A human translation of another sentence: chrF 11.1, BLEU 0.1.)
"""

from configs import base


def get_config():
    config = base.get_config("translation")
    config.pairs.N = 16
    config.model.M = 2
    config.optim.learning_rate = 2e-3
    config.optim.warmup_steps = 200
    config.train.steps = 6000
    config.train.batch_size = 32
    config.train.evaluate_every = 2000
    return config
