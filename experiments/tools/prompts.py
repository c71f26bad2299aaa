"""Read the prompt of a tool that looks inside a model: a text, or the token ids of a model without a tokenizer."""

import re

import numpy as np

from experiments.config import errors
from experiments.data import labelled, pretrained_tokenizer, tokenization
from experiments.pretrained import trained

TEXT, IDS = "A king who reads", "0 1 2"  # examples


def read_prompt(model: trained.Trained, prompt: str, name: str = "--prompt") -> tuple[np.ndarray, list[str]]:
    """Return the token ids of the prompt, id_N (int32), and the text of each token.

    The ids of a text include the special tokens around it, and [MASK] is the mask token if the model has one. Without
    a tokenizer in the model's folder, the prompt is token ids: "5 3 8". name: the flag, for messages. Raises UserError
    for an empty prompt, invalid ids, and more tokens than the model reads.
    """
    is_text = has_tokenizer(model)
    example = f"{name}='{TEXT if is_text else IDS}'"
    errors.refuse((not prompt.strip(), f"{name} is missing or empty. Add it to the command, such as {example}."))
    id_N = encode(model.tokenizer, prompt) if is_text else parse_ids(model, prompt, name, example)
    if is_text and model.kind == "classes":  # with the token that predicts the class, as in training
        id_BN, valid_BN, _ = labelled.encode(model.tokenizer, [prompt], N=len(id_N) + 1)
        id_N = id_BN[valid_BN]
    n, N = len(id_N), model.facts["N"]
    errors.refuse(
        (n == 0, f"{name} has no token. Write a longer one, such as {example}."),
        (n > N, f"{name} has {n} tokens, and the model reads {N}. Shorten it."),
    )
    return id_N, [spell(model, id) for id in id_N.tolist()]


def has_tokenizer(model: trained.Trained) -> bool:
    """Return whether the model's folder has a tokenizer."""
    return pretrained_tokenizer.find(model.path) is not None


def spell(model: trained.Trained, id: int) -> str:
    """Return the text or the name of a token, or its id if the model has no tokenizer."""
    return model.tokenizer.show(id) if has_tokenizer(model) else str(id)


def encode(tokenizer: tokenization.Tokenizer, text: str) -> np.ndarray:
    """Return the ids of a text, int32, with the mask token for each [MASK] if the tokenizer has one."""
    if tokenizer.mask is None or tokenization.MASK not in text:
        return tokenizer.encode(text)
    mask, parts = tokenizer.name(tokenizer.mask), text.split(tokenization.MASK)
    if tokenizer.mask in tokenizer.encode(mask):
        return tokenizer.encode(mask.join(parts))
    pieces = [tokenizer.encode(parts[0], specials=False)]
    for part in parts[1:]:  # a tokenizer of this project reads [MASK] as six letters
        pieces += [[tokenizer.mask], tokenizer.encode(part, specials=False)]
    return np.concatenate(pieces).astype(np.int32)


def parse_ids(model: trained.Trained, prompt: str, name: str, example: str) -> np.ndarray:
    """Return the ids in the prompt, which spaces separate, int32. Raises UserError if one is no token id of the model.

    name: the flag of the prompt. example: the flag with valid ids. Both are for the message.
    """
    W, ids = model.facts["W"], prompt.split()
    invalid = [id for id in ids if not re.fullmatch("[0-9]{1,9}", id) or int(id) >= W]
    rule = f"The model in {model.path} has no tokenizer. Write ids from 0 to {W - 1} with spaces, such as {example}."
    errors.refuse((invalid, f"{name}: {''.join(invalid[:1])!r} is not a token id. {rule}"))
    return np.array(ids, np.int32)
