"""Translate parameter trees to the symbols of the reference: one sequence, tokens as columns, heads as lists."""

import functools

import numpy as np
import reference
import reference_alternatives


def columns(x_ND) -> np.ndarray:
    """Return X, D x N."""
    return np.asarray(x_ND, np.float64).T


def logits(name: str, params: dict, X_key, X_query, h: int) -> np.ndarray:
    """Return the paper's logits [n', n] of head h for a score, before the scale (E4-E6, E11)."""
    p = {key: np.asarray(value, np.float64)[h] for key, value in params.items()}
    if name == "none":
        return reference.naive_logits(X_key, X_query)
    if name == "tied":
        return reference.symmetric_logits(X_key, X_query, p["U_HKD"], p.get("b_HK"))
    sides = p["Uq_HKD"], p["Uk_HKD"], p.get("bq_HK"), p.get("bk_HK")
    return reference.asymmetric_logits(X_key, X_query, *sides)


def weights(name: str, params: dict, X_key, X_query, *, scale: str, allowed, heads: int) -> list[np.ndarray]:
    """Return the paper's A_h for each head (E4-E7, E22). The score `none` compares tokens directly, so K = D."""
    D = len(X_key)
    K = D if name == "none" else next(iter(params.values())).shape[1]
    all_logits = (logits(name, params, X_key, X_query, h) for h in range(heads))
    return [reference.attention_matrix(reference.scaled(L, scale, K=K, D=D), allowed) for L in all_logits]


def attend(name: str, params: dict, X_key, X_query, *, scale: str, allowed=None) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return multi-head attention (E9, E11) and its weights."""
    p = {key: np.asarray(leaf, np.float64) for key, leaf in params["value"].items()}
    A = weights(name, params["score"], X_key, X_query, scale=scale, allowed=allowed, heads=len(p["Uo_HDK"]))
    return reference.low_rank_multi_head(X_key, p["Uo_HDK"], p["Uv_HKD"], A, p.get("bv_HK"), p.get("bo_D")), A


def feed(name: str, params: dict, X) -> np.ndarray:
    """Return the MLP's output (E12). Its matrices are transposed, because the reference multiplies x W_1."""
    p = {key: np.asarray(leaf, np.float64) for key, leaf in params.items()}
    b_1, b_2 = p.get("b1_F", np.zeros(len(p["W1_FD"]))), p.get("b2_D", np.zeros(len(p["W2_DF"])))
    return reference.mlp(X, p["W1_FD"].T, b_1, p["W2_DF"].T, b_2, getattr(reference, name))


def norm(params: dict, X, *, eps: float) -> np.ndarray:
    """Return X normalised with this tree and eps (E14, E15, E16)."""
    if params and eps == 0:
        return reference.token_norm(X, np.asarray(params["gain_D"]), np.asarray(params["shift_D"]))
    if eps == 0:
        return reference.standardised(X)
    gamma, beta = params.get("gain_D", np.ones(len(X))), params.get("shift_D", np.zeros(len(X)))
    return reference.layer_norm(X, np.asarray(gamma), np.asarray(beta), eps)


def block(params: dict, X, *, order: str, score: str, mlp: str, scale: str, eps: float, allowed=None) -> np.ndarray:
    """Return the output of one block (E18, E19)."""
    return getattr(reference_alternatives if order == "plain" else reference, f"{order}_block")(
        X,
        mhsa=lambda X: attend(score, params, X, X, scale=scale, allowed=allowed)[0],
        mlp=lambda X: feed(mlp, params["mlp"], X),
        norm_1=lambda X: norm(params["norm1"], X, eps=eps),
        norm_2=lambda X: norm(params["norm2"], X, eps=eps),
    )


def layer(params: dict, m: int) -> dict:
    """Return the parameters of layer m."""
    return {key: layer(leaf, m) if isinstance(leaf, dict) else np.asarray(leaf)[m] for key, leaf in params.items()}


def tokens(params: dict, w_N, *, position: str) -> np.ndarray:
    """Return X^(0) from token ids: embedding, class token, position (E1, E21, E25)."""
    E = np.asarray(params["embed"]["E_WD"])
    X = reference.transpose(reference.embedded(reference.one_hot(w_N, len(E)), E))
    if "class" in params:
        X = reference.with_class_token(X, np.asarray(params["class"]["c_D"]))
    if position == "learned":
        return reference.added_positions(X, columns(params["position"]["P_ND"]))
    return reference.added_positions(X, reference.sinusoids(*X.shape)) if position == "sinusoidal" else X


def representation(params: dict, w_N, *, position: str = "learned", causal: bool = False, **settings) -> np.ndarray:
    """Return X^(M), after the last norm if there is one (E20)."""
    X = tokens(params, w_N, position=position)
    allowed = reference.upper_triangular(X.shape[1], X.shape[1]) if causal else None
    settings = dict(order="pre_norm", score="asymmetric", mlp="gelu", scale="1/sqrt(K)", eps=1e-5) | settings
    depth = len(params["blocks"]["mlp"]["W1_FD"])
    layers = [layer(params["blocks"], m) for m in range(depth)]
    X = reference.stack(X, [functools.partial(block, p, allowed=allowed, **settings) for p in layers])
    return norm(params["norm"], X, eps=settings["eps"]) if "norm" in params else X


def log_probabilities(logits) -> np.ndarray:
    """Return log softmax of the code's logits, in NumPy."""
    l = np.asarray(logits, np.float64)
    return l - np.log(np.exp(l).sum(-1, keepdims=True))
