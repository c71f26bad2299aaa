"""Which of eight packages of Python's standard library a docstring is from: a text's class, without a download.

python launch.py --config configs/text_classes.py
48 % of the held-out texts right (the most frequent package: 18 %). --config.text.source=DIR takes texts of one's own,
DIR/class/*.txt, or a .csv, .tsv or .jsonl with the columns text and label.
"""

from configs import base


def get_config():
    config = base.get_config("text_classification")
    config.model.update(M=2, D=64, dropout=0.1)
    config.text.N = 192
    config.train.update(steps=600, batch_size=32, evaluate_every=200)
    return config
