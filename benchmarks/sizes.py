"""The sizes of every workload, once for all participants."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, what it is given, and how long a turn of a measurement is."""

    title: str
    kind: str  # words, images (both a training step), generation
    M: int  # layers
    H: int  # heads
    D: int  # features of a token
    B: int  # examples of a step, or texts generated side by side
    N: int = 0  # tokens, the context of a model of words
    W: int = 65  # words of the vocabulary
    Y: int = 28  # rows and columns of an image
    patch: int = 4  # pixels of a patch's side
    C: int = 10  # classes
    new: int = 0  # words generated after a prompt of one
    attention: str = "flash"  # how ours computes it (model.attention); a peer has its own fastest
    devices: int = 1  # as which ours takes the cores (mesh.data), where there are so many
    steps: int = 1  # of a turn that are timed
    warm_up: int = 3  # steps before the first turn, in which programs are compiled; of a peer's generation words
    lead: int = 0  # of a turn before those: the first step after a sleep takes up to a quarter longer, or, where
    # it takes much memory that the system of a virtual machine has given back meanwhile, three times as long, and the
    # second one up to twice
    rounds: int = 7  # turns of each participant

    @property
    def counted(self) -> int:
        """What a step gets through: words generated, images, or tokens."""
        return self.B * {"generation": self.new, "images": 1, "words": self.N}[self.kind]

    @property
    def unit(self) -> str:
        return {"generation": "words", "images": "images", "words": "tokens"}[self.kind]


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
}

OPTIMISER = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
TEMPERATURE = 0.8  # of generated words
KEPT = 32  # different batches, taken in turn
