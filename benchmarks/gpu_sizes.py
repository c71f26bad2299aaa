"""The sizes of what is measured on a GPU; and of the same at a toy's size, to try the program where there is none."""

import dataclasses
import json

WARM = 3  # steps before the first turn
KEPT = 16  # batches that are ready, taken in turn


@dataclasses.dataclass(frozen=True)
class Size:
    """A language model with tied output, and how it is trained."""

    M: int  # layers
    H: int  # heads
    D: int  # features of a token
    N: int  # tokens
    B: int  # examples of a step
    W: int  # words
    steps: int  # of a turn
    product: int = 8192  # rows and columns of the matrices whose product's rate is measured
    seeds: int = 8  # runs in one program
    platform: str = "cuda"  # as JAX calls it
    attention: str = "explicit"  # model.attention

    def text(self) -> str:
        """As one word of a command line."""
        return json.dumps(dataclasses.asdict(self))


def read(text: str) -> Size:
    """What `text` wrote."""
    return Size(**json.loads(text))


# GPT-2's 124 million parameters; 50,304 words, a multiple of 128 as is usual, instead of 50,257.
GPT2 = Size(M=12, H=12, D=768, N=1024, B=16, W=50304, steps=10)
SMALL = Size(M=5, H=4, D=128, N=256, B=16, W=65, steps=20)  # a million parameters, of which several runs are trained
TOY = {"N": 32, "B": 2, "W": 67, "steps": 2, "product": 64, "seeds": 2, "platform": "cpu"}
TOY_GPT2 = Size(M=2, H=2, D=16, **TOY)
TOY_SMALL = Size(M=1, H=2, D=8, **TOY)
