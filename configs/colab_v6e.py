"""170 M parameters for one v6e chip, whose matrix units are 256 x 256: five heads of 256 features, one of keys.

hf download openai-community/gpt2 tokenizer.json --local-dir gpt2
python launch.py --config configs/colab_v6e.py --config.text.source=TEXT

TEXT is a file or a folder; without it, Python's own sources.

Compiler's estimate (jax 0.12.0.1, libtpu 0.0.50.1; not measured; attention's kernels at 50 % of the peak): 583 ms for a
step of 131,072 tokens, 30 % of the peak, 6.4 of 31.2 GiB; nine layers of 1,024 features: 7 % fewer tokens per second.
Made by `python -m benchmarks.tpu_estimate configs/colab_v6e.py v6e-1`.
"""

from configs import colab_v5e


def get_config():
    config = colab_v5e.get_config()
    config.model.update(M=6, D=1280, H=5, F=3584)
    config.train.accumulation = 16
    return config
