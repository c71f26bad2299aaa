"""Attention: every token becomes a weighted average of values, with weights computed from the tokens themselves.

| file                                       | content                                                                 |
|--------------------------------------------|-------------------------------------------------------------------------|
| heads.py                                   | multi-head self-attention and cross-attention: from tokens to tokens    |
| score.py, score_symmetric.py, value.py     | how two tokens are compared; what is averaged                           |
| groups.py                                  | query heads that share keys and values (MQA, GQA)                       |
| mask.py, relative_position.py              | which tokens attend to which; positions inside the attention            |
| explicit.py                                | the average as it is defined, with the N x S weights in memory          |
| flash.py                                   | flash attention: the same averages, block by block                      |
| online_softmax.py, block_mask.py           | one block of flash attention: its softmax; its mask                     |
| chunked.py                                 | attention over a few hundred tokens, in unrolled chunks                 |
| ring.py                                    | ring attention: flash attention over tokens that devices share          |
| splash.py, fused.py                        | the flash attention kernels of a TPU and of a GPU                       |
| implementations.py                         | the choice between explicit, flash and the kernels                      |
| spec.py                                    | the functions of a layer; the arguments of a forward pass               |
"""

from tfm.attention import block_mask, chunked, explicit, flash, fused, heads, implementations, mask  # noqa: F401

# isort: split
from tfm.attention import online_softmax, relative_position, ring, score, score_symmetric, spec, splash, value  # noqa: F401
