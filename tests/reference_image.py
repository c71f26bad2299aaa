"""Image-to-image prediction (E26) once more, slowly: float64, plain loops, tokens as columns (see reference.py)."""

import reference


def masked_tokens(X, hidden, h):
    """X with column n replaced by the one learned token h where patch n is hidden (E26; X as E2 makes it, D x N)."""
    Y = reference.zeros(len(X), len(X[0]))
    for n in range(len(X[0])):
        for d in range(len(X)):
            Y[d, n] = h[d] if hidden[n] else X[d][n]
    return Y


def predicted_patches(X, W, b):
    """E26: vec(patch_n) is predicted to be W x_n + b, column n of a P x N matrix; W is P x D."""
    return reference.affine(W, X, b)


def vec_patches(image, size: int):
    """The columns vec(patch_n) of the whole image (rows, columns, channels), patches in reading order (E2): P x N."""
    columns = []
    for top in range(0, len(image), size):
        for left in range(0, len(image[0]), size):
            columns.append(reference.vec([row[left : left + size] for row in image[top : top + size]]))
    return reference.transpose(columns)


def mean_squared_error(predicted, truth, hidden) -> float:
    """E26: the mean over the hidden patches n and their pixels p of (predicted_{p,n} - truth_{p,n})^2."""
    total, count = 0.0, 0
    for n in range(len(hidden)):
        if hidden[n]:
            for p in range(len(truth)):
                total += (float(predicted[p][n]) - float(truth[p][n])) ** 2
                count += 1
    return total / count
