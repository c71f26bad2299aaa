"""Every equation once more, slowly: float64, plain loops over every index, in the layout of the text it comes from.

Turner (seeds 000, 003) and Prince (seed 001) put tokens into columns: X is D x N, A[n', n] is the weight with which n
attends to n', and the columns of A sum to one. Seeds 002 and 004 put tokens into rows. One sequence at a time; heads
are lists of matrices. Nothing here knows the fast code: no JAX, no tfm, no vectorised product.
"""

import math

import numpy as np


def zeros(*shape: int) -> np.ndarray:
    """A float64 array to be filled by loops."""
    return np.zeros(shape, np.float64)


def floats(A) -> list[list[float]]:
    """The matrix as lists of Python's own float64, whose loops are several times faster than numpy's scalars."""
    return [[float(a) for a in row] for row in A]


def product(A, B) -> np.ndarray:
    """(A B)_{i,j} = sum_k A_{i,k} B_{k,j}."""
    A, B, C = floats(A), floats(B), floats(zeros(len(A), len(B[0])))
    for i in range(len(A)):
        for j in range(len(B[0])):
            for k in range(len(B)):
                C[i][j] += A[i][k] * B[k][j]
    return np.array(C)


def transpose(A) -> np.ndarray:
    """(A^T)_{i,j} = A_{j,i}."""
    C = zeros(len(A[0]), len(A))
    for i in range(len(A)):
        for j in range(len(A[0])):
            C[j, i] = A[i][j]
    return C


def total(A, B) -> np.ndarray:
    """(A + B)_{i,j} = A_{i,j} + B_{i,j}."""
    C = zeros(len(A), len(A[0]))
    for i in range(len(A)):
        for j in range(len(A[0])):
            C[i, j] = A[i][j] + B[i][j]
    return C


# ------------------------------------------------------------------------------------------------ tokens (E1, E2, E21)


def one_hot(words, V: int) -> np.ndarray:
    """The sequence x of T unit vectors, T x V (seed 004, Variables)."""
    x = zeros(len(words), V)
    for t in range(len(words)):
        x[t, words[t]] = 1
    return x


def embedded(x, E) -> np.ndarray:
    """E1: X = x E, X_i = x_i E; rows, x is T x V one-hot, E is V x D (seed 004, Variables)."""
    return product(x, E)


def vec(patch) -> list[float]:
    """A patch of pixels (rows, columns, channels) as one vector, in reading order."""
    vector = []
    for row in patch:
        for pixel in row:
            for channel in pixel:
                vector.append(float(channel))
    return vector


def patch_tokens(image, W, size: int) -> np.ndarray:
    """E2: x_n = W vec(patch_n), the columns of X (seed 003, "Encoding an image"); patches in reading order."""
    columns = []
    for top in range(0, len(image), size):
        for left in range(0, len(image[0]), size):
            patch = [[image[top + i][left + j] for j in range(size)] for i in range(size)]
            vector = vec(patch)
            columns.append([sum(W[d][p] * vector[p] for p in range(len(vector))) for d in range(len(W))])
    return transpose(columns)


def sinusoids(D: int, N: int) -> np.ndarray:
    """E21: column n is a vector of sinusoids of different frequencies (seed 003, "Positional encoding").

    The seed leaves the frequencies open; they are those of Vaswani et al. 2017, section 3.5: feature 2i is
    sin(n / 10000^(2i/D)), feature 2i + 1 is cos(n / 10000^(2i/D)).
    """
    P = zeros(D, N)
    for n in range(N):
        for d in range(D):
            pair = d // 2
            angle = n / math.pow(10000, 2 * pair / D)
            P[d, n] = math.cos(angle) if d % 2 else math.sin(angle)
    return P


def added_positions(X, P) -> np.ndarray:
    """E21: x_n + p_n, P a table with at least as many columns as X (seed 003, "simply adding the position")."""
    Y = zeros(len(X), len(X[0]))
    for d in range(len(X)):
        for n in range(len(X[0])):
            Y[d, n] = X[d][n] + P[d][n]
    return Y


# ------------------------------------------------------------------------------------- attention (E3-E7, E9-E11, E22)


def weighted_average(X, A) -> np.ndarray:
    """E3: y_n = sum_n' x_n' A_{n',n} (seed 003, eq. 2)."""
    X, A, Y = floats(X), floats(A), floats(zeros(len(X), len(A[0])))
    for n in range(len(A[0])):
        for other in range(len(A)):
            for d in range(len(X)):
                Y[d][n] += X[d][other] * A[other][n]
    return np.array(Y)


def affine(Omega, X, beta=None) -> np.ndarray:
    """E11: beta 1^T + Omega X (seed 001, "Parameter sharing"); no beta is beta = 0."""
    Y = product(Omega, X)
    if beta is not None:
        for d in range(len(Y)):
            for n in range(len(Y[0])):
                Y[d, n] += beta[d]
    return Y


def naive_logits(X_key, X_query) -> np.ndarray:
    """E4: x_n'^T x_n at [n', n] (seed 003, "a simple way of generating the attention matrix")."""
    X_key, X_query, L = floats(X_key), floats(X_query), floats(zeros(len(X_key[0]), len(X_query[0])))
    for other in range(len(L)):
        for n in range(len(L[0])):
            for d in range(len(X_key)):
                L[other][n] += X_key[d][other] * X_query[d][n]
    return np.array(L)


def symmetric_logits(X_key, X_query, U, beta=None) -> np.ndarray:
    """E5: x_n'^T U^T U x_n at [n', n], U is K x D (seed 003, "a linear transformation of the sequence")."""
    return naive_logits(affine(U, X_key, beta), affine(U, X_query, beta))


def asymmetric_logits(X_key, X_query, U_q, U_k, beta_q=None, beta_k=None) -> np.ndarray:
    """E6: x_n'^T U_k^T U_q x_n = k_n'^T q_n at [n', n] (seed 003, eq. 3); with biases E11 (seed 001, Q[X] and K[X])."""
    return naive_logits(affine(U_k, X_key, beta_k), affine(U_q, X_query, beta_q))


def scaled(L, scale: str, *, K: int, D: int) -> np.ndarray:
    """E7: the logits divided by sqrt(D) (000), sqrt(D_q) = sqrt(K) (001, 004), or by nothing (002, 003)."""
    divisor = {"1/sqrt(D)": math.sqrt(D), "1/sqrt(K)": math.sqrt(K), "1": 1.0}[scale]
    S = zeros(len(L), len(L[0]))
    for other in range(len(L)):
        for n in range(len(L[0])):
            S[other, n] = L[other][n] / divisor
    return S


def upper_triangular(N_key: int, N_query: int) -> np.ndarray:
    """E22: 0 where n' > n and 1 elsewhere, at [n', n] (seeds 000 and 003; upper-triangular where N_key = N_query).

    With fewer queries than keys the queries are the last of the sequence.
    """
    allowed = zeros(N_key, N_query)
    for other in range(N_key):
        for n in range(N_query):
            allowed[other, n] = 0 if other > n + N_key - N_query else 1
    return allowed


def attention_matrix(L, allowed=None) -> np.ndarray:
    """E3, E22: A_{n',n} = exp(l_{n',n}) / sum_n'' exp(l_{n'',n}), with -inf added to l where n' is not allowed (004).

    A column in which nothing is allowed is 0/0 in the texts; it is defined as zeros.
    """
    A = zeros(len(L), len(L[0]))
    for n in range(len(L[0])):
        exponentials = []
        for other in range(len(L)):
            forbidden = allowed is not None and not allowed[other][n]
            exponentials.append(math.exp(L[other][n] + (-math.inf if forbidden else 0)))
        for other in range(len(L)):
            A[other, n] = exponentials[other] / sum(exponentials) if sum(exponentials) else 0
    return A


def multi_head(X, V, A) -> np.ndarray:
    """E8: Y = sum_h V_h X A_h, V_h is D x D (seed 000; seed 003, eq. 4)."""
    Y = zeros(len(V[0]), len(A[0][0]))
    for h in range(len(V)):
        Y = total(Y, product(V[h], weighted_average(X, A[h])))
    return Y


def low_rank_multi_head(X, U, U_v, A, beta_v=None, beta_o=None) -> np.ndarray:
    """E9: E8 with V_h = U_h U_{v,h}, D x K times K x D (seed 003, "the standard presentation").

    With biases (E11) the values are beta_v 1^T + U_v X (seed 001), and beta_o 1^T is added once, at the end.
    """
    Y = zeros(len(U[0]), len(A[0][0]))
    for h in range(len(U)):
        values = affine(U_v[h], X, None if beta_v is None else beta_v[h])
        Y = total(Y, product(U[h], weighted_average(values, A[h])))
    return Y if beta_o is None else total(Y, [[beta] * len(Y[0]) for beta in beta_o])


def concatenated_multi_head(X, Omega_c, Omega_v, A, beta_v=None) -> np.ndarray:
    """E10: MhSa[X] = Omega_c [Sa_1; ...; Sa_H] with Sa_h = V_h[X] A_h, one under the other (seed 001)."""
    stacked = []
    for h in range(len(Omega_v)):
        values = affine(Omega_v[h], X, None if beta_v is None else beta_v[h])
        for row in weighted_average(values, A[h]):
            stacked.append(row)
    return product(Omega_c, stacked)


def row_attention(X, Phi_q, Phi_k, Phi_v) -> np.ndarray:
    """E6, E7 in rows: softmax(Q K^T) V, the softmax over each row, no scale (seed 002; X is I x D)."""
    Q, K, V = product(X, Phi_q), product(X, Phi_k), product(X, Phi_v)
    A = transpose(attention_matrix(product(K, transpose(Q))))
    return product(A, V)


def row_multi_head(X, Q, K, V, O) -> np.ndarray:
    """E10 in rows: Y^{t,e} = O^{e,e'} Z^{t,e'}, Z = [y_1, ..., y_H] side by side, scale 1/sqrt(d) (seed 004, eq. 1)."""
    T, d = len(X), len(Q[0][0])
    Z = zeros(T, len(Q) * d)
    for h in range(len(Q)):
        queries, keys, values = product(X, Q[h]), product(X, K[h]), product(X, V[h])
        for t in range(T):
            exponentials = []
            for other in range(T):
                inner = sum(queries[t, a] * keys[other, a] for a in range(d))
                exponentials.append(math.exp(inner / math.sqrt(d)))
            for other in range(T):
                for a in range(d):
                    Z[t, h * d + a] += exponentials[other] / sum(exponentials) * values[other, a]
    return product(Z, transpose(O))


# ------------------------------------------------------------------------------------ MLP, norms, blocks (E12-E20)


def relu(z: float) -> float:
    """max(z, 0)."""
    return z if z > 0 else 0.0


def gelu(z: float) -> float:
    """z Phi(z), Phi the distribution function of the standard normal (Hendrycks and Gimpel 2016)."""
    return z * 0.5 * (1 + math.erf(z / math.sqrt(2)))


def row_mlp(x, W_1, b_1, W_2, b_2, activation) -> np.ndarray:
    """E12: FFN(x) = ReLU(x W_1 + b_1) W_2 + b_2 for one token x, a row; W_1 is D x F (seed 004)."""
    W_1, W_2, hidden = floats(W_1), floats(W_2), []
    for f in range(len(W_1[0])):
        hidden.append(activation(sum(x[d] * W_1[d][f] for d in range(len(x))) + b_1[f]))
    out = zeros(len(b_2))
    for d in range(len(b_2)):
        out[d] = sum(hidden[f] * W_2[f][d] for f in range(len(hidden))) + b_2[d]
    return out


def mlp(X, W_1, b_1, W_2, b_2, activation) -> np.ndarray:
    """E12: x_n = MLP(y_n), the same parameters for each column n (seed 003, "Stage-2")."""
    return transpose([row_mlp(x, W_1, b_1, W_2, b_2, activation) for x in floats(transpose(X))])


def residual(X, R) -> np.ndarray:
    """E13: x + res(x) (seed 003, "Residual connections")."""
    return total(X, R)


def mean(x) -> float:
    """mean(x_n) = 1/D sum_d x_{d,n} (seed 003)."""
    return sum(x[d] for d in range(len(x))) / len(x)


def var(x) -> float:
    """var(x_n) = 1/D sum_d (x_{d,n} - mean(x_n))^2 (seed 003)."""
    m = mean(x)
    return sum((x[d] - m) ** 2 for d in range(len(x))) / len(x)


def token_norm(X, gamma, beta) -> np.ndarray:
    """E14: LayerNorm(X)_{d,n} = 1/sqrt(var(x_n)) (x_{d,n} - mean(x_n)) gamma_d + beta_d (seed 003)."""
    Y = zeros(len(X), len(X[0]))
    for n, x in enumerate(floats(transpose(X))):
        m, v = mean(x), var(x)
        for d in range(len(X)):
            Y[d, n] = 1 / math.sqrt(v) * (x[d] - m) * gamma[d] + beta[d]
    return Y


def standardised(X) -> np.ndarray:
    """E15: (x_n - mean(x_n)) / std(x_n) for each token (seed 000; seed 004 with mu and sigma)."""
    Y = zeros(len(X), len(X[0]))
    for n, x in enumerate(floats(transpose(X))):
        mu, sigma = mean(x), math.sqrt(var(x))
        for d in range(len(X)):
            Y[d, n] = (x[d] - mu) / sigma
    return Y


def layer_norm(X, gamma, beta, epsilon: float) -> np.ndarray:
    """E16: y = (x - E[x]) / sqrt(Var[x] + epsilon) * gamma + beta, over the channels of each token (seed 001)."""
    Y = zeros(len(X), len(X[0]))
    for n, x in enumerate(floats(transpose(X))):
        m, v = mean(x), var(x)
        for d in range(len(X)):
            Y[d, n] = (x[d] - m) / math.sqrt(v + epsilon) * gamma[d] + beta[d]
    return Y


def pre_norm_block(X, mhsa, mlp, norm_1, norm_2) -> np.ndarray:
    """E18: Y = X + MHSA(LayerNorm(X)); X' = Y + MLP(LayerNorm(Y)) (seed 003, "Putting this all together"; 000)."""
    Y = residual(X, mhsa(norm_1(X)))
    return residual(Y, mlp(norm_2(Y)))


def post_norm_block(X, mhsa, mlp, norm_1, norm_2) -> np.ndarray:
    """E19: X <- X + MhSa[X]; X <- LayerNorm[X]; x_n <- x_n + MLP[x_n]; X <- LayerNorm[X] (seed 001; 004)."""
    X = residual(X, mhsa(X))
    X = norm_1(X)
    X = residual(X, mlp(X))
    return norm_2(X)


def stack(X, blocks) -> np.ndarray:
    """E20: X^(m) = transformer-block(X^(m-1)), m = 1..M (seeds 000, 003)."""
    for block in blocks:
        X = block(X)
    return X


# ---------------------------------------------------------------------------------------------- heads (E24, E25, E27)


def softmax(z) -> list[float]:
    """exp(z_w) / sum_w' exp(z_w')."""
    exponentials = [math.exp(z[w]) for w in range(len(z))]
    return [e / sum(exponentials) for e in exponentials]


def next_word(X, G) -> np.ndarray:
    """E24: p(word_n = w | x_{n-1}) = exp(g_w^T x_{n-1}) / sum_w exp(g_w^T x_{n-1}) (seeds 000, 003).

    Row n - 1 of the result is the distribution of word n given token n - 1; G has the rows g_w.
    """
    p = []
    for x in transpose(X):
        p.append(softmax([sum(g[d] * x[d] for d in range(len(x))) for g in G]))
    return np.array(p)


def masked_word(X, G, hidden) -> dict[int, list[float]]:
    """E27: p(word_n = w | x_n) for each hidden n, where x_n has seen the words on both sides (no mask)."""
    return {n: softmax([sum(g[d] * X[d][n] for d in range(len(X))) for g in G]) for n in hidden}


def pooled_class(X, G, b) -> list[float]:
    """E25: p(class) = softmax_c(g_c^T mean_n x_n + b_c), pooled across the whole representation (seed 003)."""
    pooled = [mean(row) for row in X]
    return softmax([sum(G[c][d] * pooled[d] for d in range(len(pooled))) + b[c] for c in range(len(G))])


def class_token_class(X, G, b) -> list[float]:
    """E25: p(class) = softmax_c(g_c^T x_0 + b_c), where x_0 is a learned token that stands before the others."""
    return softmax([sum(G[c][d] * X[d][0] for d in range(len(X))) + b[c] for c in range(len(G))])


def with_class_token(X, c) -> np.ndarray:
    """E25: [c, x_1, ..., x_N], D x (N + 1)."""
    Y = zeros(len(X), len(X[0]) + 1)
    for d in range(len(X)):
        Y[d, 0] = c[d]
        for n in range(len(X[0])):
            Y[d, n + 1] = X[d][n]
    return Y


def cross_entropy(p, words, weight) -> float:
    """sum over what is asked for of weight times -log p(word), in nats; p has one distribution per row."""
    return sum(-weight[n] * math.log(p[n][words[n]]) for n in range(len(words)) if weight[n] > 0)
