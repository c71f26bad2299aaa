"""Does the gain of two matrices grow with size and tokens? 19 to 152 M parameters, 33 to 524 M tokens, one v5e chip.

hf download openai-community/gpt2 tokenizer.json --local-dir gpt2
python launch.py --config configs/qk_sizes_colab.py --config.text.source=TEXT --workdir runs/qk_sizes
TEXT should have 524 M tokens or more (2 GB of English). Not run yet: about 26 hours, if the chip reaches half of its
peak FLOP/s; it resumes. The compiler says that the largest program fits into a v5e chip.
81 runs: three widths x three numbers of steps x three scores x three seeds. One rate for all, by maximal update
parametrisation from 256 features; tune it there first (docs/guides/widths.md).
"""

from configs import base

SCORES = ["tied_noself", "asymmetric_noself", "asymmetric"]


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.arms = [(score, {"model.score": score}) for score in SCORES]
    config.study.conditions = [
        (f"D{D}_{steps}", {"model.D": D, "train.steps": steps, "optim.warmup_steps": steps // 10})
        for steps in (500, 2000, 8000)
        for D in (256, 512, 1024)
    ]
    config.study.seeds = [0, 1, 2]
    config.text.update(tokenizer="gpt2/tokenizer.json", N=1024, head="tied")
    config.model.update(M=8, H=8, mup=256, norm="rms", bias="none", position="none", relative_position="rotary_halves")
    config.model.update(compute_dtype="bfloat16", remat="products")
    config.optim.update(learning_rate=3e-3, betas=[0.9, 0.95])
    config.train.update(batch_size=64, accumulation=16, log_every=50)
    return config
