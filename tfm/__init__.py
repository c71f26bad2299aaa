"""The mathematics of the transformer as pure functions of arrays and parameter trees.

Letters (every array's name ends in its axes; tokens are rows, while Turner and Prince write them as columns):
B sequences, N query positions, S key positions, T = B * N rows, D features, H heads, K query/key features of a head,
F hidden units of the MLP, M layers, W vocabulary, C classes, P pixels of a patch, Y X Z rows, columns and channels of
an image.

| paper                                   | here                         | file           | rows of the mathematics |
|-----------------------------------------|------------------------------|----------------|-------------------------|
| x_i E; W vec(patch)                     | E_WD; W_DP                   | embed.py       | E1, E2, E25 (class)     |
| p_n                                     | P_ND                         | position.py    | E21 (added)             |
| q_n = U_q x_n, k_n = U_k x_n (Omega_q)  | Uq_HKD, Uk_HKD, bq_HK, bk_HK | score.py       | E4-E7, E11              |
| A_{n',n} (columns sum to one)           | A_BHNS (rows sum to one)     | attention.py   | E3, E22                 |
| A_{n,n'} = 0 for n > n'                 | s <= n                       | mask.py        | E22                     |
| V_h = U_h U_{v,h} (Omega_v, Omega_c, O) | Uo_HDK, Uv_HKD, bv_HK, bo_D  | value.py       | E9, E11                 |
| W_1, b_1, W_2, b_2                      | W1_FD, b1_F, W2_DF, b2_D     | mlp.py         | E12                     |
| gamma, beta                             | gain_D, shift_D              | norm.py        | E14-E16                 |
| X + MHSA(LN(X)), LN(X + MHSA(X))        | pre_norm, post_norm          | block.py       | E13, E18, E19           |
| X^(m), m = 1..M                         | stack                        | transformer.py | E20                     |
| g_w; class logits                       | G_WD; G_CD, b_C              | head.py        | E24, E25, E27           |
"""
