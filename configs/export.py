"""A model trained here as a published family (gpt2, bert, vit, llama): files that the transformers library opens.

python launch.py --config configs/export.py --config.checkpoint=DIR --config.family=gpt2 --workdir=OUT

DIR is a run's folder. OUT gets model.safetensors and config.json; the words are not written, since a tokenizer of bytes
or characters has no such form there. A field of the run's config that the family does not have is refused by its name.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "export"
    return config
