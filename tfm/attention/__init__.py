"""Attention: every token becomes a weighted average of values, with weights computed from the tokens themselves.

| file                                       | content                                                                 |
|--------------------------------------------|-------------------------------------------------------------------------|
| heads.py                                   | multi-head self-attention and cross-attention: from tokens to tokens    |
| score.py, score_symmetric.py, value.py     | queries and keys; values and output projection                          |
| groups.py                                  | query heads that share keys and values (MQA, GQA)                       |
| mask.py, relative_position.py              | which tokens attend to which; positions inside the attention            |
| rotary_scaling.py                          | rotary positions for texts longer than in training                      |
| explicit.py                                | the definition: all N x S weights in memory, or chunks of them          |
| flash.py                                   | flash attention: the same averages, block by block                      |
| online_softmax.py, block_mask.py           | one block of flash attention: its softmax; its mask and bias            |
| ring.py                                    | ring attention: flash attention for sequences sharded over devices      |
| splash.py, fused.py                        | flash attention by kernels: JAX's splash on TPUs, cuDNN on GPUs         |
| implementations.py                         | the choice between explicit, flash and the kernels                      |
"""

from tfm.attention import block_mask, explicit, flash, fused, heads, implementations, mask  # noqa: F401

# isort: split
from tfm.attention import online_softmax, relative_position, ring, score, score_symmetric, splash, value  # noqa: F401
