"""The peer on a GPU: transformers' GPT-2 on PyTorch with fused attention, bfloat16 where autocast has it.

python -m benchmarks.gpu_torch eager|compile|product SIZE, started by benchmarks/gpu.py (participant.py).
"""

from collections.abc import Callable

import numpy as np
import torch

from benchmarks import gpu_sizes, participant, sizes, torch_peer


def training(size: gpu_sizes.Size, way: str) -> tuple[Callable[[int], float], int]:
    """n steps of mean cross-entropy, clipping and fused AdamW, of float32 parameters; and their number."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    where = torch.device("cpu" if size.platform == "cpu" else "cuda")
    model = torch_peer.gpt2(sizes.Workload("", "words", M=size.M, H=size.H, D=size.D, B=size.B, N=size.N, W=size.W))
    model = model.to(where).train()
    made, clip = torch_peer.optimiser(model), sizes.OPTIMISER["clip"]
    text = np.random.default_rng(0).integers(0, size.W, (gpu_sizes.KEPT, size.B, size.N + 1))

    def loss(w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=w, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    compiled = torch.compile(loss) if way == "compile" else loss  # the loss with it: one pass over the logits
    count = 0

    def steps(n: int) -> float:
        nonlocal count
        for _ in range(n):
            words = torch.from_numpy(text[count % gpu_sizes.KEPT]).to(where, non_blocking=True)
            count += 1
            with torch.autocast(where.type, torch.bfloat16):
                value = compiled(words[:, :-1].contiguous(), words[:, 1:].contiguous())
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            made.step()
            made.zero_grad(set_to_none=True)
        return value.item()  # waits for the GPU

    return steps, sum(p.numel() for p in model.parameters())


def products(size: gpu_sizes.Size, way: str) -> tuple[Callable[[int], float], int]:
    """Products of square matrices of bfloat16, each of the one before."""
    where = "cpu" if size.platform == "cpu" else "cuda"
    a = torch.ones(size.product, size.product, dtype=torch.bfloat16, device=where) / size.product

    def steps(n: int) -> float:
        b = a
        for _ in range(n):
            b = a @ b
        return b[0, 0].item()  # waits for the GPU

    return steps, 0


def build(arguments: list[str]) -> participant.Built:
    """What is asked for, warmed up."""
    way, size = arguments[0], gpu_sizes.read(arguments[1])
    if size.platform != "cpu" and not torch.cuda.is_available():
        raise participant.Unavailable("PyTorch sees no GPU")
    steps, parameters = (products if way == "product" else training)(size, way)
    steps(gpu_sizes.WARM)
    return participant.Built(steps, parameters, {})


if __name__ == "__main__":
    participant.serve(build)
