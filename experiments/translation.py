"""Translation: an encoder-decoder learns from pairs of sentences in two languages (E26)."""

import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.config import disk, settings as configs
from experiments.data import pairs, translation_score
from experiments.engine import run as runs
from experiments.folder import log
from experiments.model import baselines, build, losses, sharding, splits, task as tasks
from tfm import layout as layouts, models
from tfm.attention import mask as masks
from tfm.decode import beam, generate

BEAM = 4  # number of translations that beam search keeps
LENGTH_PENALTY = 0.6  # beam search divides log p by ((5 + length) / 6) to this power (Wu et al. 2016)
SHOWN = 12  # number of translations in sample.txt
SCORED = 500  # the most held-out source sentences that are translated for chrF and BLEU
SIDES = "source", "target"


class Corpus(NamedTuple):
    """Sentence pairs as token ids, and held-out sentences as text, each with all its reference translations."""

    name: str
    subwords: pairs.Subwords
    train: pairs.Rows
    evaluation: pairs.Rows
    sources: list[str]
    references: list[list[str]]
    lines: list[str]  # facts about the data, which a run prints
    sha256: str  # of the pairs
    common: dict[str, list[str]]  # "source" and "target" -> their most common words


def config() -> dict[str, dict]:
    """Return {"pairs": {setting: (default, help)}}, the settings of the sentence pairs."""
    return {
        "pairs": {
            "source": (
                "spa-eng",
                "spa-eng (English to Spanish), or a path: tab-separated text, or a folder or zip of such files",
            ),
            "vocabulary": (4096, "number of subwords that both languages share, with 3 special tokens and 256 bytes"),
            "N": (24, "tokens of a sentence with its [EOS]; longer pairs are left out of training and loss"),
        }
    }


def read(settings: configs.Settings) -> Corpus:
    """Return the sentence pairs of pairs.source as token ids. The subwords are learned from the training pairs.

    Corpus.train and .evaluation lack the pairs of more than pairs.N tokens a side. Raises UserError if either has no
    pair left.
    """
    p = settings.pairs
    configs.at_least(2, {"pairs.N": p.N})  # a subword and [EOS]
    data = pairs.load(p.source)
    subwords = pairs.train((side for pair in data.train for side in pair), W=p.vocabulary)
    rows = [pairs.rows(subwords, split, N=p.N) for split in (data.train, data.evaluation)]
    counts = [f"{len(split.source_BS):,} ({split.longer:,} longer than {p.N} tokens left out)" for split in rows]
    first = " -> ".join(repr(side[:60]) for side in data.train[0])
    lines = [
        *data.description.splitlines(),
        f"{data.name}: training pairs: {counts[0]}; held-out pairs: {counts[1]}; vocabulary {subwords.size:,}",
        f"{data.name}: the first training pair is {first}",
    ]
    common = {
        side: pairs.most_common_words(texts) for side, texts in zip(SIDES, zip(*data.train, strict=True), strict=True)
    }
    return Corpus(data.name, subwords, *rows, *choose_scored(data.evaluation, SCORED), lines, data.sha256, common)


def prepare(
    settings: configs.Settings,
    mesh: Mesh,
    *,
    read: Callable[..., Corpus] = read,
    change: Callable[[models.Model], models.Model] = models.unchanged,
) -> runs.Work:
    """Prepare the sentence pairs, the encoder-decoder, its loss, and the figures (see language.prepare).

    read(settings) -> Corpus.
    """
    translation_score.metrics()  # before the training: raises UserError if the library is missing
    corpus, N = read(settings), settings.pairs.N
    W = corpus.subwords.size
    train, evaluation = pairs.examples(corpus.train), pairs.examples(corpus.evaluation)
    layout = sharding.choose_layout(settings, mesh, W=W)
    padding = masks.padding(np.ones((1, N), bool), at_end=True)
    model = build.encoder_decoder(settings.model, W=W, N=N, tied_output=True, layout=layout, mask=padding)
    model = change(model)
    # Most targets are padding, so the loss is sparse.
    token_loss = losses.choose_token_loss(settings, model, sparse=True, layout=layout)

    def inputs(batch: dict, layout: layouts.Layout = layouts.ONE) -> dict:
        return {name: batch[name] for name in ("source_BS", "valid_BS", "w_BN")}

    count_W = np.bincount(corpus.train.target_BN.ravel(), minlength=W)
    count_W[pairs.PAD] = 0
    batch = splits.evaluation_batch_size(settings.train, 2 * N, len(corpus.sources))
    tokenizer = corpus.subwords.library.to_str(pretty=True).encode()
    return tasks.make_work(
        settings,
        model,
        inputs,
        token_loss,
        splits.make_splits(settings, train, evaluation, tokens=2 * N),
        baseline=functools.partial(baselines.guess_token, W=W, token=count_W.argmax()),
        causal=("w_BN", 0),
        figures=functools.partial(figures, settings, corpus, batch),
        files={"tokenizer.json": tokenizer, runs.DATA: disk.as_json(corpus.common)},
        lines=corpus.lines,
        data_sha256=corpus.sha256,
    )


def choose_scored(held_out: list[pairs.Pair], n: int) -> tuple[list[str], list[list[str]]]:
    """Return n source sentences (or all, if fewer), and all reference translations of each.

    The choice depends on their hashes, not on their order in the file.
    """
    references: dict[str, list[str]] = {}
    for source, target in held_out:
        references.setdefault(source, []).append(target)
    sources = sorted(references, key=lambda source: hashlib.sha256(source.encode()).digest())[:n]
    return sources, [references[source] for source in sources]


def make_translator(model: models.Model, subwords: pairs.Subwords, *, N: int, batch: int) -> Callable:
    """Return a function (params, sentences) -> {"greedy": translations, "beam": translations}.

    The translation of an empty sentence, and of one with more than N tokens (with [EOS]), is ''. batch: sentences
    decoded at a time.
    """

    @jax.jit
    def decode(params: Any, source_BS: jax.Array) -> dict[str, jax.Array]:
        B = len(source_BS)
        prompt = jnp.full((B, 1), pairs.BOS, jnp.int32), jnp.ones(B, jnp.int32)
        start = functools.partial(model.start, params, source_BS, source_BS != pairs.PAD, capacity=N)
        step, options = functools.partial(model.step, model.by_layer(params)), {"steps": N, "stop": (pairs.EOS,)}
        w_BN, _ = generate.generate(start, step, *prompt, jax.random.key(0), temperature=0.0, **options)
        w_BQN, _ = beam.search(start, step, *prompt, beam=BEAM, length_penalty=LENGTH_PENALTY, **options)
        return {"greedy": w_BN, "beam": w_BQN[:, 0]}

    def translate(params: Any, sentences: list[str]) -> dict[str, list[str]]:
        source_BS, fits_B = pairs.pad(subwords, sentences, N=N)
        translations: dict[str, list[str]] = {"greedy": [], "beam": []}
        for first in range(0, len(sentences), batch):
            # The last sentence pads the last batch.
            index_B = np.minimum(first + np.arange(batch), len(sentences) - 1)
            for name, w_BN in jax.device_get(decode(params, source_BS[index_B])).items():
                translations[name] += map(subwords.decode, w_BN)
        translated = [fits and sentence != "" for fits, sentence in zip(fits_B, sentences, strict=True)]
        return {
            name: [text if fits else "" for text, fits in zip(texts, translated, strict=False)]
            for name, texts in translations.items()
        }

    return translate


def score(translations: dict[str, list[str]], references: list[list[str]]) -> dict[str, float]:
    """Return {"eval/chrf_greedy", "eval/bleu_beam", "baseline/chrf", ...: score from 0 to 100}.

    translations: {"greedy", "beam": one of each sentence}. references: all reference translations of each sentence. The
    baseline "translates" each sentence by a reference of the next one.
    """
    texts = {f"eval/{{}}_{name}": texts for name, texts in translations.items()}
    texts["baseline/{}"] = [others[0] for others in references[1:] + references[:1]]
    scores = {name: translation_score.scores(outputs, references) for name, outputs in texts.items()}
    return {name.format(metric): values[metric] for name, values in scores.items() for metric in values}


def figures(
    settings: configs.Settings, corpus: Corpus, batch: int, work: runs.Work, params, folder, rows
) -> Iterator[pathlib.Path | dict[str, float]]:
    """Yield a dict of scores, then paths: loss curves, cross-attention of a sentence if one fits, and translations."""
    from experiments.figures import plots  # imports matplotlib, which takes a second

    N, model = settings.pairs.N, work.model
    translations = make_translator(model, corpus.subwords, N=N, batch=batch)(params, corpus.sources)
    bleu_words_by = translation_score.choose_tokenizer(corpus.references)
    guess = dict.fromkeys(("chrf", "bleu"), "always the translation of another sentence")
    yield score(translations, corpus.references) | {"bleu_words_by": bleu_words_by, "guess": guess}
    title, drawings = f"{settings.experiment}: {corpus.name}", folder / "figures"
    yield plots.loss_curves(drawings / "loss.png", rows, unit="nats per subword", title=title)
    if (maps := cross_attention(corpus, model, params, translations["greedy"], N=N)) is not None:
        title = "cross-attention: the decoder's tokens (rows)\nattend to the source (columns)"
        yield plots.attention_matrices(drawings / "cross_attention.png", **maps, title=title, mean=True)
    text = table(corpus, translations)
    disk.write(folder / "sample.txt", f"{text}\n".encode())
    long = int(np.sum(~pairs.pad(corpus.subwords, corpus.sources, N=N)[1]))
    log.say(f"\n{text}\n")
    print(f"\n  chrF and BLEU of {len(corpus.sources):,} held-out sentences, {long:,} of them longer than")
    print(f"  {N} tokens and scored as empty translations; sacrebleu's tokenizer of BLEU is {bleu_words_by}")
    yield folder / "sample.txt"


def table(corpus: Corpus, translations: dict[str, list[str]]) -> str:
    """Return the first source sentences with their references and their greedy and beam translations, as text."""
    blocks = []
    for i, (source, truth) in enumerate(zip(corpus.sources[:SHOWN], corpus.references, strict=False)):
        lines = [f"{name + ':':<7} {texts[i]}" for name, texts in translations.items()]
        blocks.append("\n".join([f"source: {source}", f"truth:  {' / '.join(truth)}", *lines]))
    return "\n\n".join(blocks)


def cross_attention(
    corpus: Corpus, model: models.Model, params: Any, translations: list[str], *, N: int
) -> dict[str, Any] | None:
    """Return arguments of plots.attention_matrices for one translation: weights, and tokens of target and source.

    It is the first in which both sides fit into N tokens and the source has at least 8 tokens. If none has 8, the
    longest source that fits is chosen. Return None if none fits.
    """
    subwords = corpus.subwords
    source_BS, source_fits_B = pairs.pad(subwords, corpus.sources, N=N)
    target_BN, target_fits_B = pairs.pad(subwords, translations, N=N)
    length_B = np.sum(source_BS != pairs.PAD, axis=1) * (source_fits_B & target_fits_B)
    if not length_B.any():
        return None
    b = int(np.argmax(length_B >= min(8, length_B.max())))
    batch = pairs.examples(pairs.Rows(source_BS[b : b + 1], target_BN[b : b + 1], 0))[0](np.arange(1), None)
    inputs = batch["source_BS"], batch["valid_BS"], batch["w_BN"]
    _, aux = jax.jit(functools.partial(model.apply, look=("A_cross",)))(params, *inputs)
    ids = (row[row != pairs.PAD].tolist() for row in (source_BS[b], target_BN[b]))
    keys, queries = ([subwords.decode([id]) or subwords.name(id) for id in row] for row in ids)
    A_MHNS = np.asarray(aux["look"]["A_cross"])[:, 0, :, : len(queries), : len(keys)]
    return {"A_MHNS": A_MHNS, "queries": queries, "keys": keys}
