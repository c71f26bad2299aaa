"""The sizes of every workload, once for all participants, and what the models are given: random words and pixels.

No step's time depends on their values, and nothing is learned. Batches of NumPy arrays are ready before the clock
starts; each participant puts them where it computes.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is done, of what size, and how long a turn of a measurement is."""

    title: str
    kind: str  # words, images (both a training step); generation; product of matrices; read from memory
    M: int = 1  # layers
    H: int = 1  # heads
    D: int = 1  # features of a token
    B: int = 1  # examples of a step, or texts generated side by side
    N: int = 0  # tokens, the context of a model of words; rows and columns of a matrix; numbers that are read
    W: int = 65  # words of the vocabulary
    Y: int = 28  # rows and columns of an image
    patch: int = 4  # pixels of a patch's side
    C: int = 10  # classes
    new: int = 0  # words generated after a prompt of one
    attention: str = "flash"  # how ours computes it (model.attention); a peer has its own fastest
    dtype: str = "float32"  # of products
    platform: str = "cpu"  # cpu, gpu
    devices: int = 1  # as which ours takes the cores (mesh.data), where there are so many
    steps: int = 1  # of a turn that are timed
    warm_up: int = 3  # steps before the first turn, in which programs are compiled; of a peer's generation words
    lead: int = 0  # of a turn before those: the first step after a sleep takes up to a quarter longer, or, where
    # it takes much memory that the system of a virtual machine has given back meanwhile, three times as long, and the
    # second one up to twice
    rounds: int = 7  # turns of each participant

    @property
    def counted(self) -> float:
        """What a step gets through, in units of `UNITS`."""
        one = {"generation": self.new, "images": 1, "words": self.N, "product": 2 * self.N**3, "read": 4 * self.N}
        return self.B * one[self.kind]

    def changed(self, **fields: object) -> "Workload":
        return dataclasses.replace(self, **fields)

    def toy(self) -> "Workload":
        """The same at a size that takes no time, on the CPU."""
        most = {"M": 2, "H": 2, "D": 16, "B": 2, "N": 32, "W": 65, "new": 13, "steps": 1, "warm_up": 1, "lead": 1}
        small = {name: min(getattr(self, name), n) for name, n in most.items()}
        return self.changed(**small, rounds=1, platform="cpu")


UNITS = {"generation": "words", "images": "images", "words": "tokens", "product": "FLOP", "read": "bytes"}  # by kind
WORKLOADS = {
    "step_a": Workload("4 layers x 128, N 64, B 12", "words", M=4, H=4, D=128, N=64, B=12, steps=30, lead=3),
    "step_b": Workload("6 layers x 384, N 256, B 8", "words", M=6, H=6, D=384, N=256, B=8, steps=2, lead=2),
    "step_c": Workload("ViT 6 layers x 64, B 128", "images", M=6, H=4, D=64, B=128, devices=2, steps=6, lead=4),
    "step_d": Workload(
        "1 layer x 128, N 8,192", "words", M=1, H=4, D=128, N=8192, B=1, warm_up=1, steps=2, lead=2, rounds=5
    ),
    "generate": Workload(
        "1,000 words, B 1", "generation", M=6, H=6, D=384, N=1024, B=1, new=1000, warm_up=24, rounds=5
    ),
    "generate_32": Workload(
        "1,000 words, B 32", "generation", M=6, H=6, D=384, N=1024, B=32, new=1000, warm_up=24, rounds=2
    ),
    "product": Workload("products of 2,048 x 2,048 matrices", "product", N=2048, steps=4, lead=1),
    "read": Workload("1 GiB read from memory", "read", N=2**28, steps=4, lead=1),
}
_GPT2 = Workload(  # 124 million parameters; 50,304 words, a multiple of 128 as is usual, instead of 50,257
    "GPT-2, bfloat16, flash attention", "words", M=12, H=12, D=768, N=1024, B=16, W=50304, attention="flash",
    dtype="bfloat16", platform="gpu", steps=10, lead=2, rounds=5,
)  # fmt: skip
_PRODUCT = WORKLOADS["product"].changed(N=8192, dtype="bfloat16", platform="gpu")
GPU = {
    "gpu_fused": _GPT2,
    "gpu_explicit": _GPT2.changed(title="GPT-2, bfloat16, explicit attention", attention="explicit"),
    "gpu_product": _PRODUCT.changed(title="products of 8,192 x 8,192 matrices, bfloat16"),
}

OPTIMISER = {"learning_rate": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
TEMPERATURE = 0.8  # of generated words
KEPT = 32  # different batches, taken in turn


def words(size: Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches (w_BN, target_BN), int64 as PyTorch wants them: the target is the next word."""
    text = np.random.default_rng(0).integers(0, size.W, (KEPT, size.B, size.N + 1))
    return [(batch[:, :-1].copy(), batch[:, 1:].copy()) for batch in text]


def images(size: Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches (image_BYXZ, label_B), float32 with mean 0 and deviation 1, and int64."""
    rng = np.random.default_rng(0)
    shape = (size.B, size.Y, size.Y, 1)
    return [(rng.standard_normal(shape, np.float32), rng.integers(0, size.C, size.B)) for _ in range(KEPT)]


def prompt(size: Workload) -> np.ndarray:
    """Prompts of one word each, (B, 1)."""
    return np.zeros((size.B, 1), np.int64)
