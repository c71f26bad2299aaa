"""Text classification without a download: predict to which of eight packages of Python a docstring belongs.

python launch.py --config configs/text_classes.py
48 % accuracy on held-out texts (the most frequent package: 18 %).
For your texts, set --config.text.source to a folder DIR/class/*.txt, or to a .csv, .tsv or .jsonl with the columns
text and label.
"""

from configs import base


def get_config():
    config = base.get_config("text_classification")
    config.model.update(M=2, D=64, dropout=0.1)
    config.text.N = 192
    config.train.update(steps=600, batch_size=32, evaluate_every=200)
    return config
