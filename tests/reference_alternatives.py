"""The slow reference of what the texts name beside their transformer: other norms (E17), stages without residual
connections, a score that is no product (Bahdanau et al. 2015), queries that are no linear map (Karbevski 2026).

As in reference.py: float64, plain loops, tokens as columns (X is D x N).
"""

import math

import reference
import reference_scores
import reference_tokens


def position_statistics(batch) -> tuple[list[float], list[float]]:
    """Mean and variance of each position n over the features of all sequences X of the batch: "batch normalization,
    which normalizes over the feature and batch dimension together" (seed 003)."""
    means, variances = [], []
    for n in range(len(batch[0][0])):
        position = [float(X[d][n]) for X in batch for d in range(len(X))]
        means.append(reference.mean(position))
        variances.append(reference.var(position))
    return means, variances


def batch_features_norm(X, means, variances, gamma, beta, epsilon: float):
    """(x_{d,n} - mean_n) / sqrt(var_n + epsilon) * gamma_d + beta_d (seed 003; epsilon as in E16)."""
    Y = reference.zeros(len(X), len(X[0]))
    for d in range(len(X)):
        for n in range(len(X[0])):
            Y[d, n] = (X[d][n] - means[n]) / math.sqrt(variances[n] + epsilon) * gamma[d] + beta[d]
    return Y


def layer_sequence_norm(X, gamma, beta, epsilon: float):
    """One mean and one variance of all D N numbers of X: LayerNorm "applied to both the features and across the feature
    maps", whose places are the sequence (seed 003)."""
    every = [float(X[d][n]) for d in range(len(X)) for n in range(len(X[0]))]
    means, variances = [reference.mean(every)] * len(X[0]), [reference.var(every)] * len(X[0])
    return batch_features_norm(X, means, variances, gamma, beta, epsilon)


def additive_logits(X_key, X_query, *, Uq, Uk, v, h, bq=None):
    """L[n', n] = v^T tanh(U_q x_n + b_q + U_k x_n'), before the scale (Bahdanau et al. 2015, appendix A.1.2)."""

    def logit(q: list, k: list) -> float:
        return sum(v[i] * math.tanh(q[i] + k[i]) for i in range(len(q)))

    keys, queries = reference.affine(Uk, X_key), reference.affine(Uq, X_query, bq)
    return reference_scores.tabulated(logit, keys, queries)


def nonlinear_query_logits(X_key, X_query, *, Uk, W1, W2, gain1, gain2, h, bk=None):
    """Karbevski 2026: the query of head h is the h-th part of (x + LN(GELU(RMS(x) W_1) W_2)) / 2."""
    inner = reference.affine(W1, reference_tokens.rms_norm(X_query, gain1, 1e-5), None)
    hidden = [[reference.gelu(z) for z in row] for row in reference.floats(inner)]
    f = reference.layer_norm(reference.affine(W2, hidden, None), gain2, [0.0] * len(W2), 1e-5)
    both = [[(x + y) / 2 for x, y in zip(*rows, strict=True)] for rows in zip(X_query, f, strict=True)]
    return reference_scores.identity_query(X_key, both, Uk=Uk, h=h, bk=bk)


def plain_block(X, mhsa, mlp, norm_1, norm_2):
    """Y = MHSA(LayerNorm(X)); X' = MLP(LayerNorm(Y)): E18 without the two sums (seed 003, before "residual")."""
    return mlp(norm_2(mhsa(norm_1(X))))
