"""The PyTorch peers: GPT-2 and ViT of `transformers`, each with its fastest options.

Attention (scaled_dot_product_attention) and AdamW are fused, and PyTorch uses all cores. bfloat16 is by autocast.
Generation uses a key-value cache, which grows in eager mode and is static in compiled mode.
"""

import itertools
import os
import shutil
from typing import Any

import torch
import transformers

from benchmarks import participant, sizes


def gpt2(size: sizes.Workload) -> torch.nn.Module:
    """Return GPT-2 with random parameters: learned positions, biases, tied output, exact GELU, no dropout."""
    fields = {"vocab_size": size.W, "n_positions": size.N, "n_embd": size.D, "n_layer": size.M, "n_head": size.H}
    fields |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"activation_function": "gelu"}
    fields |= {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**fields))


def vit(size: sizes.Workload) -> torch.nn.Module:
    """Return a ViT for one channel with random parameters: class token, learned positions, no dropout."""
    fields = {"hidden_size": size.D, "num_hidden_layers": size.M, "num_attention_heads": size.H, "num_channels": 1}
    fields |= {"intermediate_size": 4 * size.D, "image_size": size.Y, "patch_size": size.patch, "num_labels": size.C}
    fields |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-5}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**fields, attn_implementation="sdpa"))


def training(size: sizes.Workload, mode: str) -> participant.Built:
    """Build training steps: mean cross-entropy, clipping, AdamW with decay on matrices only."""
    device, o = torch.device("cuda" if size.platform == "gpu" else "cpu"), sizes.OPTIMISER
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    model = (vit if size.kind == "images" else gpt2)(size).to(device).train()
    compiled = torch.compile(model) if mode == "compile" else model
    batches, name, options = sizes.make_batches(size), "input_ids", {"use_cache": False}
    if size.kind == "images":
        batches, name, options = [(image.transpose(0, 3, 1, 2).copy(), y) for image, y in batches], "pixel_values", {}
    matrices, vectors = ([p for p in model.parameters() if (p.dim() >= 2) == matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": o["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=o["learning_rate"], betas=o["betas"], eps=o["eps"], fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=size.dtype == "bfloat16")
    batches = itertools.cycle(batches)

    def steps(n: int) -> float:
        for _ in range(n):
            example, target = (torch.from_numpy(array).to(device, non_blocking=True) for array in next(batches))
            with autocast:
                logits = compiled(**options, **{name: example}).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), target.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), o["clip"])
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return loss.item()  # waits for the GPU

    return participant.Built(steps, sum(p.numel() for p in model.parameters()))


def generation(size: sizes.Workload, mode: str) -> participant.Built:
    """Build steps that each generate size.new tokens after prompts of one token."""
    model, prompt = gpt2(size).eval(), torch.zeros((size.B, 1), dtype=torch.int64)
    options: dict[str, Any] = {"max_new_tokens": size.new, "do_sample": True, "temperature": sizes.TEMPERATURE}
    options |= {"top_k": 0, "top_p": 1.0, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    if mode == "compile":
        compile_config = transformers.CompileConfig(fullgraph=False, mode="default")
        compile_config._compile_all_devices = True  # transformers compiles only for accelerators otherwise
        options |= {"cache_implementation": "static", "compile_config": compile_config}

    def steps(n: int) -> float:
        for _ in range(n):
            with torch.no_grad():
                model.generate(prompt, **options)
        return 0.0

    return participant.Built(steps, sum(p.numel() for p in model.parameters()))


def build(size: sizes.Workload, mode: str) -> participant.Built:
    """Build the model and its steps. mode: eager or compile. Raises Unavailable without a C++ compiler or a GPU."""
    if mode == "compile" and not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "clang++")):
        raise participant.Unavailable("torch.compile needs a C++ compiler: install g++ or set CXX")
    if size.platform == "gpu" and not torch.cuda.is_available():
        raise participant.Unavailable("PyTorch finds no GPU")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    return (generation if size.kind == "generation" else training)(size, mode)
