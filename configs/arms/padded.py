"""Documents that are padded to N tokens with the token that ends them, one to a window, as in Kayyam et al. 2026.

As experiment = "configs.arms.padded". With padding.in_loss the loss also counts the padding. Both metrics count the
same held-out documents, whatever the loss counts.
"""

import functools

import jax.numpy as jnp
import numpy as np

from experiments import language
from experiments.config import errors
from experiments.data import corpus as corpora, download
from experiments.model import losses, splits
from tfm import loss

END = 0  # the id of NUL, which ends a document and pads it, among characters and bytes
FIELDS = {"in_loss": (False, "whether the loss counts the tokens of the padding like those of the text")}


def config():
    """Return the settings of `language`, and the section `padding`."""
    return language.config() | {"padding": FIELDS}


def read_speeches():
    """Return the speeches of tinyshakespeare as documents: all but every tenth to train on, and every tenth."""
    text = download.fetch(*download.NAMED["tinyshakespeare"]).read_text(encoding="utf-8")
    speeches = [speech for speech in text.split("\n\n") if speech]
    return [speech for i, speech in enumerate(speeches) if i % 10], speeches[::10]


def pad(token_T, evaluation=False, *, N, in_loss):
    """Return (fetch, n) for the n documents of a text: an end, the document and more ends, cut after N tokens."""
    w_BN = np.full((np.sum(token_T == END) + 1, N + 1), END, np.int32)
    for w_N, document in zip(w_BN, np.split(token_T, np.flatnonzero(token_T == END)), strict=True):
        document = document[document != END][:N]
        w_N[1 : 1 + len(document)] = document
    weight_BN = np.float32(in_loss | (before_end(w_BN[:, 1:]) > 0))

    def fetch(index_B, rng):
        w, weight = w_BN[index_B], weight_BN[index_B]
        return {"w_BN": w[:, :-1], "target_BN": w[:, 1:], "weight_BN": weight}

    return fetch, len(w_BN)


def before_end(target_BN):
    """Return 1 for the tokens of a document and for its first end, 0 for the padding after it."""
    end_BN = (target_BN == END).astype(np.int32)
    return end_BN.cumsum(axis=1) - end_BN == 0


def per_position(logits, target, weight):
    """Return the cross-entropy of all N positions, padding included. A document's first token has the weight 1."""
    return loss.cross_entropy(logits, target, jnp.broadcast_to(weight[:, :1], weight.shape))


def per_text_token(logits, target, weight):
    """Return the cross-entropy of the tokens of documents and of their first end."""
    return loss.cross_entropy(logits, target, weight * before_end(target))


position, text = losses.Metric(per_position, "less"), losses.Metric(per_text_token, "less")


def prepare(settings, mesh):
    """Prepare the experiment: `language` with one document to a window. Raises UserError for other tokenizers."""
    t, cut = settings.text, functools.partial(pad, N=settings.text.N, in_loss=settings.padding.in_loss)
    corpus = corpora.read_corpus(t, ())._replace(size=None)  # the loss of a position gives no bits per byte
    problem = f"text.tokenizer = {t.tokenizer} does not end documents with the id {END}. Choose characters or bytes"
    errors.refuse((corpus.tokenizer.document_start != END, problem))
    work = language.prepare(settings, mesh, read=lambda *_: corpus, windows=lambda *_: cut)
    data = splits.make_splits(settings, cut(corpus.train_T), cut(corpus.evaluation_T), tokens=t.N)
    return work._replace(task=work.task._replace(**data))  # documents do not overlap, as windows do
