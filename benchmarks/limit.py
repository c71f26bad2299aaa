"""What a program can hardly go below on a machine: a step's products at the rate of large ones, reading at that of the
memory. With the fastest peer's time this is about how many times faster than it anything could be.

Rates and times are medians of one session: where a machine's speed varies, so does this.
"""

from typing import Any

import jax

from benchmarks import plans, sizes
from experiments.engine import compilation


def seconds(name: str, *, product: float, read: float) -> float:
    """Of a training step its products; of generation the products or the numbers read, whichever takes longer.

    product: FLOP/s of large products. read: bytes/s.
    """
    size = sizes.WORKLOADS[name]
    if size.kind != "generation":
        return step_flops(name) / product
    matrices = 12 * size.M * size.D**2 + size.W * size.D  # four of D x D and two of D x 4D of a layer; unembedding
    return max(2 * size.B * size.new * matrices / product, 4 * size.new * (matrices + kept(size)) / read)


def kept(size: sizes.Workload) -> float:
    """Keys and values that are looked at for a word, in the mean over the words."""
    return 2 * size.M * size.B * size.D * (size.new + 1) / 2


def step_flops(name: str, **changes: Any) -> int:
    """Floating-point operations that the equations of a training step ask for in matrix products: 3 x its forward pass.

    Pairs of tokens that the causal mask hides are not counted, whether a program leaves them out or not.
    """
    made = plans.made(name, **{"model.attention": "explicit", "mesh.data": 1} | changes)
    batch = made.task.train[0]
    params = jax.eval_shape(made.task.init, jax.random.key(0))
    forward = compilation.flops(made.task.loss_and_metrics, params, batch, None)
    if sizes.WORKLOADS[name].kind == "words":
        B, N = batch["w_BN"].shape
        M, H, K, _ = params["blocks"]["score"]["Uk_HKD"].shape
        forward -= B * M * H * 4 * K * (N * (N - 1) // 2)  # of each hidden pair a product of q and k, and of A and v
    return 3 * forward
