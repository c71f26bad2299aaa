"""The mathematics of the transformer as pure functions of arrays and parameter trees.

Every array's name ends in one letter for each of its axes. Tokens are rows; Turner 2023 and Prince 2023 write them as
columns.

| letters | axes                                              | letters | axes                                        |
|---------|---------------------------------------------------|---------|---------------------------------------------|
| B       | sequences of a batch                              | F       | hidden units of the MLP                     |
| N, S    | query positions, key positions                    | M       | layers                                      |
| T       | all tokens of a batch, as rows: B * N             | W, C, J | token ids, classes, kinds of segments       |
| D       | features of a token                               | P       | values of a patch: pixels times channels    |
| H       | heads                                             | Y, X, Z | rows, columns and channels of an image      |
| G       | heads of keys and values, if not H (groups.py)    | R       | offsets between two tokens, or their buckets|
| K, V    | query/key features, value features of a head      | L       | rank of an adapter                          |
| Q       | query/key features of tied_wide, sym_plus_skew    | I       | hidden units of nonlinear_query             |
| O       | outputs of a matrix (linear.py)                   |         |                                             |

The rows E1 to E30 are equations of the source texts (docs/references.md). The column "here" has names of variants and
parameters; `b...` stands for their biases.

| id  | paper                                     | here                              | file                 |
|-----|-------------------------------------------|-----------------------------------|----------------------|
| E1  | X_i = x_i E                               | E_WD (segments: S_JD)             | embed.py             |
| E2  | x_n = W vec(patch_n)                      | W_DP, b_D; cut, join              | embed.py             |
|     | patches and token ids in one sequence     | mixed: W_DP, b_D, E_WD            |                      |
| E3  | y_n = sum_n' x_n' A_{n',n}                | A_BHNS, rows sum to one           | explicit.py          |
| E4  | A ~ exp(x_n'^T x_n)                       | none                              | score.py             |
| E5  | A ~ exp(x_n'^T U^T U x_n)                 | tied: U_HKD, b_HK                 | score_symmetric.py   |
| E6  | A ~ exp(x_n'^T U_k^T U_q x_n)             | asymmetric: Uq_HKD, Uk_HKD        | score.py             |
|     | between E5 and E6                         | U_HQD, sigma_HK, P_HKK            | score_symmetric.py   |
|     | A_{n,n} = 0 if n may attend to others     | attend_to_self, self_bias         | relative_position.py |
| E7  | scale of the logits                       | SCALES                            | score.py             |
| E8  | Y = sum_h V_h X A_h                       | full_rank: V_HDD; identity        | value.py             |
| E9  | V_h = U_h U_{v,h}                         | low_rank: Uo_HDK, Uv_HKD          | value.py             |
|     | keys as values                            | keys: Uo_HDK                      | value.py             |
| E10 | Omega_c [Sa_1; ...; Sa_H]                 | the sum over heads as one product | value.py             |
|     | post-processing of a head's average       | gated: Ug_HKD; exclusive          | value.py             |
|     | heads that share keys and values          | Uk_GKD, bk_GK, Uv_GKD, bv_GK      | groups.py            |
| E11 | beta_q 1^T + Omega_q X, ...               | bq_HK, bk_HK, bv_HK, bo_D         | score.py, value.py   |
| E12 | W_1, W_2; one or two hidden layers; gated | W1_FD, Wh_FF, Wg_FD, W2_DF, b...  | mlp.py               |
| E13 | x + res(x); res(x) alone                  | pre_norm, post_norm; plain        | block.py             |
| E14 | (x - mean)/sqrt(var) gamma + beta         | token: gain_D, shift_D; rms       | norm.py              |
| E15 | ... without gamma, beta                   | token_plain                       | norm.py              |
| E16 | ... with eps inside the root              | eps                               | norm.py              |
| E17 | over batch and sequence; over sequence    | batch: mean_D, var_D; instance    | norm.py              |
|     | over batch and features; features and     | batch_features: mean_N, var_N;    |                      |
|     | sequence together                         | layer_sequence                    |                      |
| E18 | X + MHSA(LN(X)); Y + MLP(LN(Y))           | pre_norm                          | block.py             |
| E19 | LN(X + MHSA(X)); LN(X + MLP(X))           | post_norm                         | block.py             |
| E20 | X^(m) = block(X^(m-1))                    | stack                             | transformer.py       |
| E21 | positions added or concatenated           | P_ND; Wx_DD, Wp_DD                | position.py          |
|     | relative, inside the attention            | rotary, b_HR, buckets, alibi      | relative_position.py |
| E22 | A_{n,n'} = 0 for n > n'                   | causal: s <= n; padding, prefix,  | mask.py              |
|     |                                           | window, documents, both           |                      |
| E23 | X^(n) = first n columns of X^(n+1)        | start, step: cached keys, values  | kv_cache.py          |
| E24 | p(w_n = w) = softmax(g_w^T x_{n-1})       | next_word: G_WD, b_W              | head.py              |
|     | sampling; beam search                     | generate, search                  | generate.py, beam.py |
| E25 | pooled; class token                       | G_CD, b_C; c_D                    | head.py, embed.py    |
| E26 | sequence to sequence                      | Uq_HKD ... under score_cross      | encoder_decoder.py   |
|     | image to image                            | h_D; W_PD, b_P                    | embed.py, head.py    |
| E27 | masked tokens                             | masked_word; transform: W_DD      | head.py              |
| E28 | A_{n',n} = a(n' - n)                      | constant; relative: b_HR          | score.py,            |
|     |                                           |                                   | relative_position.py |
| E29 | cost of attention                         | weights one block at a time       | flash.py             |
|     | W + (alpha / r) B A                       | A_DL, B_HKL ... under lora        | lora.py              |
| E30 | Adam, clipping, decaying learning rate    | experiments/engine/optim.py       |                      |
|     | batch size that grows during training     | experiments/engine/batches.py     |                      |

attention/heads.py is multi-head attention. implementations.py chooses how a model computes it: with all weights
(explicit.py), in blocks (flash.py), or with a kernel for TPUs (splash.py) or GPUs (fused.py). flash.py computes each
block with online_softmax.py, and short sequences in chunks of explicit.py. decode/sampling.py has temperature, top-k,
top-p and other filters of logits; loss.py has losses as sums and counts. layout.py describes how devices share a model.
ring.py sends keys and values around devices that share a sequence. platform.py has the special cases of CPUs, GPUs and
TPUs.
"""

from tfm import attention, block, decode, embed, encoder_decoder, head, initial, layout  # noqa: F401

# isort: split
from tfm import linear, lora, loss, mlp, norm, platform, position, shapes, symmetry, transformer  # noqa: F401
from tfm.models import language_model, vision_model  # noqa: F401
