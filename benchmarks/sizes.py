"""The workloads, and the random token ids and pixels that all participants use.

The time of a step does not depend on their values. Batches are NumPy arrays, made before the clock starts.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """A computation, its sizes, and how it is measured: in rounds, in which each participant has a turn."""

    title: str
    kind: str  # text or images (a training step), generation
    M: int = 1  # layers
    H: int = 1  # heads
    D: int = 1  # features of a token
    B: int = 1  # examples in a step, or texts generated together
    N: int = 0  # tokens of an example; the context of a language model
    W: int = 65  # size of the vocabulary
    Y: int = 28  # rows and columns of an image
    patch: int = 4  # rows and columns of a patch
    C: int = 10  # classes
    new: int = 0  # tokens generated after a prompt of one token
    attention: str = "flash"  # model.attention of ours; a peer uses its fastest attention
    dtype: str = "float32"  # of matrix products
    platform: str = "cpu"  # or gpu
    devices: int = 1  # mesh.data of ours, and devices of Flax; at most the number of cores
    steps: int = 1  # timed steps in a turn
    warm_up: int = 3  # steps before the first turn, which compile the programs
    lead: int = 0  # untimed steps before them: the first steps after a sleep take up to three times as long
    rounds: int = 7  # turns of each participant

    @property
    def items_per_step(self) -> int:
        """Return the number of tokens or images that a step processes."""
        return self.B * {"generation": self.new, "images": 1, "text": self.N}[self.kind]

    def changed(self, **fields: object) -> "Workload":
        return dataclasses.replace(self, **fields)

    def toy(self) -> "Workload":
        """Return the workload at a size for tests."""
        limits = {"M": 2, "H": 2, "D": 16, "B": 2, "N": 32, "new": 13, "steps": 1, "warm_up": 1, "lead": 1, "rounds": 1}
        return self.changed(**{name: min(getattr(self, name), n) for name, n in limits.items()})


_TEXT = Workload("1,000 tokens, B 1", "generation", M=6, H=6, D=384, N=1024, new=1000, warm_up=1, rounds=5)
_GPT2 = Workload("GPT-2 in bfloat16 on a GPU", "text", M=12, H=12, D=768, N=1024, B=16, W=50304)  # W: 128 x 393
WORKLOADS = {
    "step_a": Workload("4 layers x 128, N 64, B 12", "text", M=4, H=4, D=128, N=64, B=12, steps=30, lead=3),
    "step_b": Workload("6 layers x 384, N 256, B 8", "text", M=6, H=6, D=384, N=256, B=8, steps=2, lead=2),
    "step_c": Workload("ViT 6 layers x 64, B 128", "images", M=6, H=4, D=64, B=128, devices=2, steps=6, lead=4),
    "step_d": Workload("1 layer x 128, N 8,192", "text", H=4, D=128, N=8192, warm_up=1, steps=2, lead=2, rounds=5),
    "generate": _TEXT,
    "generate_32": _TEXT.changed(title="1,000 tokens, B 32", B=32, rounds=2),
    "gpu": _GPT2.changed(dtype="bfloat16", platform="gpu", steps=10, lead=2, rounds=5),
}
OPTIMISER = {"learning_rate": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
TEMPERATURE = 0.8  # of generated tokens
BATCHES = 32  # different batches, used in turn


def make_batches(size: Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return BATCHES batches (w_BN, target_BN) of int64, as PyTorch needs them; the target is the next token.

    For images: (image_BYXZ, label_B), float32 with mean 0 and standard deviation 1, and int64.
    """
    rng = np.random.default_rng(0)
    if size.kind == "images":
        shape = (size.B, size.Y, size.Y, 1)
        return [(rng.standard_normal(shape, np.float32), rng.integers(0, size.C, size.B)) for _ in range(BATCHES)]
    token_KBN = rng.integers(0, size.W, (BATCHES, size.B, size.N + 1))
    return [(batch[:, :-1].copy(), batch[:, 1:].copy()) for batch in token_KBN]
