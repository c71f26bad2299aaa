r"""Print how symmetric the heads of published models are, and the rank of the skew part: the table of qk_results.md.

python docs/skew.py models/gpt2 models/bert-base-uncased

Twenty models of the hub, about 17 GB; we have not run them, because we cannot reach the hub:

for m in openai-community/gpt2 openai-community/gpt2-medium openai-community/gpt2-large distilbert/distilgpt2 \
    google-bert/bert-base-uncased google-bert/bert-base-cased google-bert/bert-large-uncased FacebookAI/roberta-base \
    FacebookAI/roberta-large FacebookAI/xlm-roberta-base distilbert/distilbert-base-uncased BAAI/bge-small-en-v1.5 \
    google/vit-base-patch16-224 google/vit-base-patch16-224-in21k Qwen/Qwen2-0.5B Qwen/Qwen2.5-0.5B \
    HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-360M TinyLlama/TinyLlama-1.1B-Chat-v1.0 \
    sentence-transformers/all-MiniLM-L6-v2; do
  hf download $m config.json model.safetensors --local-dir models/$(basename $m)
done; python docs/skew.py models/*

A row has medians over all heads, and the median over layers of s of the heads' sum (Saponati et al. 2025).
M = U_q^T U_k = S + N, with S symmetric and N skew, has s = (|S|^2 - |N|^2) / |M|^2, so the share of N in the squared
norm is (1 - s) / 2. The rank counts the singular values that hold 90 % of |N|^2; 2 K is the most. "random": the median
rank of 64 pairs U_q, U_k of the same shape with normal entries. Rotary positions are left out of M.
"""

import pathlib
import sys

import jax
import numpy as np

from experiments.model import variants
from experiments.pretrained import open_model
from tfm import symmetry

HEAD = "| model | layers | heads | K | s | s of the sum | share of N | rank of N | first layer | last layer | random |"


def measure(folder):
    """Return the cells of a model's row."""
    model = open_model.open(folder)
    m, factors = model.fields, variants.choose(model.fields, "score").factors

    def measure_score(score):
        layers = symmetry.layers(score, factors, M=m.M, D=m.D)
        return layers, jax.lax.map(lambda layer: symmetry.skew_rank(*factors(layer, D=m.D)), score)

    layers, rank_MH = jax.jit(measure_score)(model.params["blocks"]["score"])
    random_rank_H = symmetry.skew_rank(*jax.random.normal(jax.random.key(0), (2, 64, m.K, m.D)))
    s, of_sum = np.median(layers.symmetry_H), np.median(layers.symmetry)
    ranks = [np.median(rank) for rank in (rank_MH, rank_MH[0], rank_MH[-1], random_rank_H)]
    numbers = [f"{s:.2f}", f"{of_sum:.2f}", f"{(1 - s) / 2:.2f}", f"{ranks[0]:.0f} of {2 * m.K}"]
    numbers += [f"{rank:.0f}" for rank in ranks[1:]]
    return [f"`{pathlib.Path(folder).name}`", *(str(size) for size in (m.M, m.H, m.K)), *numbers]


def main(folders):
    """Print the table."""
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n")
    for folder in folders:
        print(f"| {' | '.join(measure(folder))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
