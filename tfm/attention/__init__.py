"""Attention: every token becomes a weighted average of values, with weights computed from the tokens themselves.

| file                                       | what it is                                                              |
|--------------------------------------------|-------------------------------------------------------------------------|
| heads.py                                   | multi-head self-attention and cross-attention: from tokens to tokens    |
| score.py, score_symmetric.py, value.py     | how two tokens are compared; what is averaged                           |
| groups.py                                  | query heads that share keys and values (MQA, GQA)                       |
| mask.py, relative_position.py              | who may attend to whom; positions inside the attention                  |
| explicit.py                                | the average as it is defined, with the N x S weights in memory          |
| flash.py                                   | flash attention: the same averages, block by block                      |
| online_softmax.py, block_mask.py           | one block of it: its softmax; what its mask allows                      |
| chunked.py                                 | flash attention of a few hundred tokens, written out                    |
| ring.py                                    | ring attention: flash attention of tokens that devices share            |
| splash.py, fused.py                        | flash attention by the kernels of a TPU, and of a GPU                   |
| implementations.py                         | which of these computes the averages                                    |
| spec.py                                    | what a layer is made of; what a forward pass tells it                   |
"""

from tfm.attention import block_mask, chunked, explicit, flash, fused, heads, implementations, mask  # noqa: F401

# isort: split
from tfm.attention import online_softmax, relative_position, ring, score, score_symmetric, spec, splash, value  # noqa: F401
