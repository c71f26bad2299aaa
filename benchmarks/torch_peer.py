"""The peers on PyTorch: GPT-2 and ViT of `transformers`, each in what was the fastest of its own ways.

python -m benchmarks.torch_peer NAME eager|compile, started by the harness (participant.py).

Attention is scaled_dot_product_attention, whose CPU kernel is fused (flash); AdamW is the fused one; gradients are set
to None; all cores compute. Generation keeps keys and values: eager in the cache that grows, compiled in the static one.
"""

import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers

from benchmarks import inputs, participant, sizes


def gpt2(size: sizes.Workload) -> torch.nn.Module:
    """transformers' GPT-2 with random parameters: learned positions, biases, tied output, exact GELU, no dropout."""
    config = transformers.GPT2Config(
        vocab_size=size.W,
        n_positions=size.N,
        n_embd=size.D,
        n_layer=size.M,
        n_head=size.H,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return transformers.GPT2LMHeadModel(config)


def vit(size: sizes.Workload) -> torch.nn.Module:
    """transformers' ViT for one channel with random parameters: class token, learned positions, no dropout."""
    config = transformers.ViTConfig(
        hidden_size=size.D,
        num_hidden_layers=size.M,
        num_attention_heads=size.H,
        intermediate_size=4 * size.D,
        image_size=size.Y,
        patch_size=size.patch,
        num_channels=1,
        num_labels=size.C,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    return transformers.ViTForImageClassification(config)


def optimiser(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW with decay on matrices only, in PyTorch's fused form."""
    o = sizes.OPTIMISER
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": o["weight_decay"]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=o["learning_rate"], betas=(o["beta1"], o["beta2"]), eps=o["eps"], fused=True)


def training(
    model: torch.nn.Module, logits: Callable[..., torch.Tensor], batches: Iterable[tuple[Any, Any]]
) -> Callable[[int], float]:
    """steps(n): n steps of mean cross-entropy, clipping and AdamW, each on the next batch."""
    made, clip = optimiser(model), sizes.OPTIMISER["clip"]
    waiting = itertools.cycle(batches)
    model.train()

    def steps(n: int) -> float:
        for _ in range(n):
            example, target = next(waiting)
            answer = logits(torch.from_numpy(example))
            loss = torch.nn.functional.cross_entropy(
                answer.reshape(-1, answer.shape[-1]), torch.from_numpy(target).reshape(-1)
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            made.step()
            made.zero_grad(set_to_none=True)
        return loss.item()

    return steps


def generation(model: torch.nn.Module, size: sizes.Workload, way: str) -> Callable[[int], float]:
    """steps(n): n times the prompts and their new words, by `generate`, after a few words to warm up."""
    model.eval()
    prompt = torch.from_numpy(inputs.prompt(size))
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

    return steps


def build(arguments: list[str]) -> participant.Built:
    """The workload and the way (eager, compile) that are named."""
    name, way = arguments
    if way == "compile" and not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "clang++")):
        raise participant.Unavailable("torch.compile needs a C++ compiler, and there is none")
    size = sizes.WORKLOADS[name]
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = vit(size) if size.kind == "images" else gpt2(size)
    compiled = torch.compile(model) if way == "compile" and size.kind != "generation" else model
    if size.kind == "generation":
        steps = generation(model, size, way)
    elif size.kind == "images":
        batches = [(image.transpose(0, 3, 1, 2).copy(), label) for image, label in inputs.images(size)]
        steps = training(model, lambda image: compiled(pixel_values=image).logits, batches)
    else:
        steps = training(model, lambda w: compiled(input_ids=w, use_cache=False).logits, inputs.words(size))
    if size.kind != "generation":
        steps(size.warm_up)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    parameters = sum(p.numel() for p in model.parameters())  # a tied matrix once
    return participant.Built(steps, parameters, {"versions": versions, "threads": threads})


if __name__ == "__main__":
    participant.serve(build)
