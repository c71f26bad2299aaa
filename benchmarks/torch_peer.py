"""The peers on PyTorch: GPT-2 and ViT of `transformers`, each in what was the fastest of its own ways.

Attention is scaled_dot_product_attention, whose kernel is fused (flash); AdamW is the fused one; gradients are set to
None; all cores compute. Generation keeps keys and values: eager in the cache that grows, compiled in the static one.
bfloat16 is autocast's, with parameters in float32.
"""

import contextlib
import itertools
import os
import shutil
from typing import Any

import torch
import transformers

from benchmarks import participant, sizes

FACTS = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())  # a tied matrix once


def gpt2(size: sizes.Workload) -> torch.nn.Module:
    """transformers' GPT-2 with random parameters: learned positions, biases, tied output, exact GELU, no dropout."""
    shape = {"vocab_size": size.W, "n_positions": size.N, "n_embd": size.D, "n_layer": size.M, "n_head": size.H}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    off |= dict.fromkeys(("bos_token_id", "eos_token_id"))
    how = {"activation_function": "gelu", "attn_implementation": "sdpa"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **off, **how))


def vit(size: sizes.Workload) -> torch.nn.Module:
    """transformers' ViT for one channel with random parameters: class token, learned positions, no dropout."""
    shape = {"hidden_size": size.D, "num_hidden_layers": size.M, "num_attention_heads": size.H}
    shape |= {"intermediate_size": 4 * size.D, "image_size": size.Y, "patch_size": size.patch, "num_channels": 1}
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    how = {"num_labels": size.C, "layer_norm_eps": 1e-5, "attn_implementation": "sdpa"}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape, **off, **how))


def training(size: sizes.Workload, way: str) -> participant.Built:
    """Steps of mean cross-entropy, clipping and AdamW (fused, with decay on matrices only), each on the next batch."""
    where = torch.device("cuda" if size.platform == "gpu" else "cpu")
    torch.set_float32_matmul_precision("high" if where.type == "cuda" else "highest")
    model = (vit if size.kind == "images" else gpt2)(size).to(where).train()
    compiled = torch.compile(model) if way == "compile" else model
    if size.kind == "images":
        batches = [(image.transpose(0, 3, 1, 2).copy(), label) for image, label in sizes.images(size)]
        names: dict[str, Any] = {"pixel_values": None}
    else:
        batches, names = sizes.words(size), {"input_ids": None, "use_cache": False}
    o = sizes.OPTIMISER
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": o["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    update = torch.optim.AdamW(groups, lr=o["learning_rate"], betas=o["betas"], eps=o["eps"], fused=True)
    first, waiting = next(iter(names)), itertools.cycle(batches)
    narrow = torch.autocast(where.type, torch.bfloat16) if size.dtype == "bfloat16" else contextlib.nullcontext()

    def steps(n: int) -> float:
        for _ in range(n):
            example, target = (torch.from_numpy(array).to(where, non_blocking=True) for array in next(waiting))
            with narrow:
                logits = compiled(**names | {first: example}).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), target.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), o["clip"])
            update.step()
            update.zero_grad(set_to_none=True)
        return loss.item()  # waits for the GPU

    return participant.Built(steps, parameters(model), FACTS)


def generation(size: sizes.Workload, way: str) -> participant.Built:
    """The prompts and their new words, by `generate`, after a few words to warm up."""
    model, prompt = gpt2(size).eval(), torch.from_numpy(sizes.prompt(size))
    how: dict[str, Any] = {"max_new_tokens": size.new, "do_sample": True, "temperature": sizes.TEMPERATURE}
    how |= {"top_k": 0, "top_p": 1.0, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    if way == "compile":
        compiling = transformers.CompileConfig(fullgraph=False, mode="default")
        compiling._compile_all_devices = True  # transformers compiles on accelerators alone, unless told so
        how |= {"cache_implementation": "static", "compile_config": compiling}

    def few(words: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((size.B,), words.shape[1] > size.warm_up)

    with torch.no_grad():  # the first words, with caches as long as they are to be
        model.generate(prompt, stopping_criteria=transformers.StoppingCriteriaList([few]), **how)

    def steps(n: int) -> float:
        for _ in range(n):
            with torch.no_grad():
                words = model.generate(prompt, **how)
            if words.numel() != size.counted + prompt.numel():
                raise RuntimeError(f"{words.numel() - prompt.numel()} words instead of {size.counted}")
        return 0.0

    return participant.Built(steps, parameters(model), FACTS)


def large(size: sizes.Workload, way: str) -> participant.Built:
    """Products of square matrices, or sums of many numbers, one after the other."""
    product, where = size.kind == "product", "cuda" if size.platform == "gpu" else "cpu"
    x = torch.ones((size.N, size.N) if product else size.N, dtype=getattr(torch, size.dtype), device=where)

    def steps(n: int) -> float:
        for _ in range(n):
            y = torch.mm(x, x) if product else torch.sum(x)
        return 0.0 * y.flatten()[0].item()  # waits for the GPU

    return participant.Built(steps, 0, FACTS)


def build(size: sizes.Workload, way: str) -> participant.Built:
    """The workload in this way (eager, compile)."""
    if way == "compile" and not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "clang++")):
        raise participant.Unavailable("torch.compile needs a C++ compiler, and there is none")
    if size.platform == "gpu" and not torch.cuda.is_available():
        raise participant.Unavailable("PyTorch sees no GPU")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    kinds = {"generation": generation, "product": large, "read": large}
    return kinds.get(size.kind, training)(size, way)
