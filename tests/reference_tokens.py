"""The slow reference of the norms (E16, E17), the MLPs (E12) and the values (E8) that first light left out.

As in reference.py: float64, plain loops, tokens as columns (X is D x N); only the rows of seed 004 are rows.
"""

import math

import numpy as np
import reference

# --------------------------------------------------------------------------------------------------------------- norms


def rms_norm(X, gamma, epsilon: float) -> np.ndarray:
    """x_{d,n} / sqrt(1/D sum_d' x_{d',n}^2 + epsilon) * gamma_d: E16 without E[x] and beta (Zhang, Sennrich 2019)."""
    Y = reference.zeros(len(X), len(X[0]))
    for n, x in enumerate(reference.floats(reference.transpose(X))):
        mean_square = reference.mean([x_d * x_d for x_d in x])
        for d in range(len(X)):
            Y[d, n] = x[d] / math.sqrt(mean_square + epsilon) * gamma[d]
    return Y


def batch_statistics(batch) -> tuple[list[float], list[float]]:
    """E17: mean and variance of each feature over the tokens of all sequences X of the batch (seed 003)."""
    means, variances = [], []
    for d in range(len(batch[0])):
        feature = [float(X[d][n]) for X in batch for n in range(len(X[0]))]
        means.append(reference.mean(feature))
        variances.append(reference.var(feature))
    return means, variances


def batch_norm(X, means, variances, gamma, beta, epsilon: float) -> np.ndarray:
    """E17: (x_{d,n} - mean_d) / sqrt(var_d + epsilon) * gamma_d + beta_d (seed 003; epsilon as in E16)."""
    Y = reference.zeros(len(X), len(X[0]))
    for d in range(len(X)):
        for n in range(len(X[0])):
            Y[d, n] = (X[d][n] - means[d]) / math.sqrt(variances[d] + epsilon) * gamma[d] + beta[d]
    return Y


def instance_norm(X, gamma, beta, epsilon: float) -> np.ndarray:
    """E17: over the sequence, mean_d and var_d of the N numbers x_{d,1} ... x_{d,N} (seed 003)."""
    return batch_norm(X, *batch_statistics([X]), gamma, beta, epsilon)


# ---------------------------------------------------------------------------------------------------------------- MLPs


def gelu_tanh(z: float) -> float:
    """0.5 z (1 + tanh[sqrt(2 / pi) (z + 0.044715 z^3)]) (Hendrycks and Gimpel 2016, section 2)."""
    return 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def silu(z: float) -> float:
    """z sigma(z), sigma the logistic function."""
    return z / (1 + math.exp(-z))


def layer(x, W, b) -> list[float]:
    """x W + b for a row x (seed 004)."""
    return [sum(x[i] * W[i][j] for i in range(len(x))) + b[j] for j in range(len(b))]


def two_hidden_mlp(X, W_1, b_1, W_h, b_h, W_2, b_2, activation) -> np.ndarray:
    """E12 with 2 hidden layers (seed 003): a(a(x W_1 + b_1) W_h + b_h) W_2 + b_2, the same for each column of X."""
    W_1, W_h, W_2, tokens = reference.floats(W_1), reference.floats(W_h), reference.floats(W_2), []
    for x in reference.floats(reference.transpose(X)):
        first = [activation(z) for z in layer(x, W_1, b_1)]
        second = [activation(z) for z in layer(first, W_h, b_h)]
        tokens.append(layer(second, W_2, b_2))
    return reference.transpose(tokens)


def swiglu(X, W, b, V, c, W_2, b_2) -> np.ndarray:
    """(Swish(x W + b) * (x V + c)) W_2 + b_2 for each column of X (Shazeer 2020, eq. 5 and 6; there without biases)."""
    W, V, W_2, tokens = reference.floats(W), reference.floats(V), reference.floats(W_2), []
    for x in reference.floats(reference.transpose(X)):
        gate, linear = layer(x, W, b), layer(x, V, c)
        tokens.append(layer([silu(gate[f]) * linear[f] for f in range(len(gate))], W_2, b_2))
    return reference.transpose(tokens)


# -------------------------------------------------------------------------------------------------------------- values


def identity_multi_head(X, A) -> np.ndarray:
    """E8 with V_h = I / H: y_n = 1/H sum_h sum_n' x_n' A_{h,n',n}; one head is E3 (seed 003, eq. 2)."""
    eye = reference.zeros(len(X), len(X))
    for d in range(len(X)):
        eye[d, d] = 1 / len(A)
    return reference.multi_head(X, [eye] * len(A), A)


def cut(Omega_c, H: int) -> list[np.ndarray]:
    """Omega_c = [U_1 ... U_H]: the H blocks of columns that meet the heads one under the other (E10, seed 001)."""
    K = len(Omega_c[0]) // H
    U = [reference.zeros(len(Omega_c), K) for _ in range(H)]
    for h in range(H):
        for d in range(len(Omega_c)):
            for k in range(K):
                U[h][d, k] = Omega_c[d][h * K + k]
    return U
