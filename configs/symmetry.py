"""How symmetric and how directional a trained model's attention is: of a run made here, or of a published model.

python launch.py --config configs/symmetry.py --config.checkpoint=DIR

DIR is a run's folder, a folder with config.json and model.safetensors (GPT-2, BERT, ViT, Llama), or a file of llama2.c.
For every layer: s, from -1 (skew) over 0 (random) to 1 (symmetric), of each head's U_q^T U_k (mean and median over
heads) and of their sum, and the directionality d of the sum, less than 0 where the key's side dominates; then the
median over layers (Saponati et al. 2025). Nothing is written unless --workdir is given.

Two CPU cores: 3 s with start and compilation for stories260K.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "symmetry"
    return config
