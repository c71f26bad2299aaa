"""A model trained here as a published family (gpt2, bert, vit, llama): files that the transformers library opens.

python launch.py --config configs/export.py --config.checkpoint=DIR --config.family=gpt2 --workdir=OUT

DIR is a run's folder, or that of a published model. OUT gets model.safetensors, config.json and the files of its words
(those of bytes or characters only this project reads). A field of the run's config that the family does not have is
refused by its name; rotary positions are written in Llama's order of the features.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "export"
    return config
