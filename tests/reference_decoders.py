"""What decoders of today have beside the texts: gated MLPs, norms of queries and keys, scaled rotary positions.

Float64, plain loops, tokens as columns (see reference.py)."""

import cmath
import math

import numpy as np
import reference
import reference_scores
import reference_tokens


def quick_gelu(z: float) -> float:
    """z sigma(1.702 z) (Hendrycks and Gimpel 2016, section 2)."""
    return z / (1 + math.exp(-1.702 * z))


def gated_mlp(X, W, b, V, c, W_2, b_2, activation) -> np.ndarray:
    """(a(x W + b) * (x V + c)) W_2 + b_2 for each column of X (Shazeer 2020, eq. 6; there without biases)."""
    W, V, W_2, tokens = reference.floats(W), reference.floats(V), reference.floats(W_2), []
    for x in reference.floats(reference.transpose(X)):
        gate, linear = reference_tokens.layer(x, W, b), reference_tokens.layer(x, V, c)
        product = [activation(gate[f]) * linear[f] for f in range(len(gate))]
        tokens.append(reference_tokens.layer(product, W_2, b_2))
    return reference.transpose(tokens)


def qknorm_logits(X_key, X_query, *, Uq, Uk, gainq, gaink, h, bq=None, bk=None, epsilon=1e-5) -> np.ndarray:
    """RMS(U_k x_n' + b_k) . RMS(U_q x_n + b_q), each with gains (Henry et al. 2020 with the norm of Qwen3)."""
    keys = reference_tokens.rms_norm(reference.affine(Uk, X_key, bk), gaink, epsilon)
    queries = reference_tokens.rms_norm(reference.affine(Uq, X_query, bq), gainq, epsilon)
    return reference_scores.tabulated(reference_scores.dot, keys, queries)


# ------------------------------------------------------------------------------------------- scaled rotary positions


def linear(i: int, n: int, K: int, base: float, factor: float) -> float:
    """Chen et al. 2023, equation 4: f(x, m L / L')."""
    return (n / factor) * base ** (-2 * i / K)


def dynamic(i: int, n: int, K: int, base: float, factor: float, N: float) -> float:
    """Peng et al. 2023: the base b' = b s^(|D| / (|D| - 2)) of "NTK-aware", s = max(1, factor l / N - (factor - 1))
    from the length l = n + 1."""
    stretch = 1.0
    if n + 1 > N:
        stretch = factor * (n + 1) / N - (factor - 1)
    return n * (base * stretch ** (K / (K - 2))) ** (-2 * i / K)


def llama3(i: int, n: int, K: int, base: float, factor: float, low: float, high: float, N: float) -> float:
    """By wavelengths, as Llama 3.1's code has it: short ones stay, long ones are `factor` times longer."""
    theta = base ** (-2 * i / K)
    wavelength = 2 * math.pi / theta
    if wavelength < N / high:
        return n * theta
    if wavelength > N / low:
        return n * theta / factor
    smooth = (N / wavelength - low) / (high - low)
    return n * ((1 - smooth) * theta / factor + smooth * theta)


def yarn(i: int, n: int, K: int, base: float, factor: float, N: float, fast: float = 32, slow: float = 1) -> float:
    """Peng et al. 2023, equations 17 to 20; gamma is a ramp over i between whole numbers, as in their code."""
    ends = [K * math.log(N / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)]
    first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), K - 1)
    gamma = 1 - min(1, max(0, (i - first) / (last - first)))
    theta = base ** (-2 * i / K)
    return n * ((1 - gamma) * theta / factor + gamma * theta)


def yarn_length(factor: float) -> float:
    """Equation 22: sqrt(1/t) = 0.1 ln(s) + 1, on queries and on keys."""
    return 0.1 * math.log(factor) + 1


def scaled_rotary(X, positions, angle, *, base: float, halves: bool, length: float = 1.0) -> np.ndarray:
    """Feature pair i of the columns of X, read as a complex number, times length * exp(i angle(i, n, K, base))."""
    K, N = len(X), len(X[0])
    Y = reference.zeros(K, N)
    for n in range(N):
        for i in range(K // 2):
            first, second = (i, i + K // 2) if halves else (2 * i, 2 * i + 1)
            turn = cmath.exp(1j * angle(i, positions[n], K, base))
            turned = complex(X[first][n], X[second][n]) * turn * length
            Y[first, n], Y[second, n] = turned.real, turned.imag
    return Y
