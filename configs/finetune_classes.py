"""Fine-tuning: a published BERT, RoBERTa or DistilBERT learns to classify texts.

python launch.py --config configs/finetune_classes.py --config.init_from=DIR --config.text.source=TEXTS

DIR is a folder from the Hugging Face hub. TEXTS is a .csv, .tsv or .jsonl with the columns text and label, a folder of
such files, or a folder TEXTS/class/*.txt.
Add --config.optim.lora=8 --config.optim.learning_rate=5e-4 to train only adapters of rank 8 and the head.
"""

from configs import base


def get_config():
    config = base.get_config("text_classification")
    config.init_fresh = "head"
    config.model.dropout = 0.1
    config.optim.update(learning_rate=5e-5, schedule="linear:0", weight_decay=0.01)
    config.train.update(steps=1000, batch_size=32, evaluate_every=250)
    return config
