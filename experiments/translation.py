"""Sequence to sequence: a sentence of one language into one of another, learned from pairs (E26)."""

import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.build import baselines, losses, model as models, sharding, splits, task as tasks
from experiments.data import pairs, translation_score
from experiments.engine import config as configs, disk, run
from tfm import layout as layouts
from tfm.attention import mask as masks
from tfm.decode import beam, generate

BEAM = 4  # translations kept by beam search
LENGTH_PENALTY = 0.6  # beam search divides log p by ((5 + length) / 6) to this power (Wu et al. 2016)
SHOWN = 12  # translations in sample.txt
SCORED = 500  # held-out source sentences, or all, that are translated for chrF and BLEU
SIDES = "source", "target"


class Corpus(NamedTuple):
    """Sentence pairs as ids, and the held-out sentences that are translated, each with all its translations."""

    name: str
    subwords: pairs.Subwords
    train: pairs.Rows
    evaluation: pairs.Rows
    sources: list[str]
    references: list[list[str]]
    lines: list[str]  # about the data
    sha256: str  # of the pairs
    common: dict[str, list[str]]  # the most common words of source and target


def config() -> dict[str, dict]:
    """Return the settings of the sentence pairs."""
    return {
        "pairs": {
            "source": (
                "spa-eng",
                "spa-eng (English-Spanish), or a path to tab-separated text, a folder or a zip of such",
            ),
            "reverse": (False, "the second column, or the language that comes second in the alphabet, is the source"),
            "vocabulary": (4096, "subwords of both languages together, the 3 specials and the 256 bytes included"),
            "N": (24, "tokens of a side, its [EOS] included; training leaves longer pairs out"),
        }
    }


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """Return the sentence pairs, the encoder-decoder, its loss, and the figures."""
    translation_score.metrics()  # raises UserError for a missing library before the training, not after it
    corpus, N = read(settings), settings.pairs.N
    W = corpus.subwords.size
    train, evaluation = pairs.examples(corpus.train), pairs.examples(corpus.evaluation)
    fields = splits.make_splits(settings, train, evaluation, tokens=2 * N)
    layout, padding = sharding.choose_layout(settings.model, devices, W=W), masks.padding(np.ones((1, N), bool))
    model = models.build_encoder_decoder(settings.model, W=W, N=N, tied_output=True, layout=layout, mask=padding)
    # sparse: most targets are padding
    token_loss = losses.choose_token_loss(settings, model, sparse=True, layout=layout)

    def inputs(batch: dict) -> dict:
        return {name: batch[name] for name in ("source_BS", "valid_BS", "w_BN")}

    def loss(params: Any, batch: dict, *, key_B: Any = None, layout: layouts.Layout = layouts.ONE) -> tuple:
        x_BND, aux = model.hidden(params, **inputs(batch), key_B=key_B, layout=layout)
        return token_loss(params, x_BND, batch, layout), aux

    count_W = np.bincount(corpus.train.target_BN.ravel(), minlength=W)
    count_W[pairs.PAD] = 0
    fields |= baselines.guess_token(fields["evaluation"], W=W, answer=count_W.argmax())
    fields["guess"] |= dict.fromkeys(("chrf", "bleu"), "always the translation of another sentence")
    task = tasks.make_task(settings, model, loss, inputs, layout=layout, maps=None, **fields)
    batch = splits.evaluation_batch_size(settings.train, 2 * N, len(corpus.sources))
    translate = translator(model, corpus.subwords, N=N, batch=batch)
    tokenizer = corpus.subwords.library.to_str(pretty=True).encode()
    return run.Work(
        task,
        figures=functools.partial(figures, settings, corpus, model, translate),
        apply=lambda params, batch: model.apply(params, **inputs(batch))[0],
        files={"tokenizer.json": tokenizer, run.DATA: disk.as_json(corpus.common)},
        lines=corpus.lines,
        data_sha256=corpus.sha256,
    )


def read(settings: configs.Settings) -> Corpus:
    """Return the pairs of the config. The subwords come from the training part."""
    p = settings.pairs
    configs.at_least(2, {"pairs.N": p.N})  # a word and its [EOS]
    data = pairs.load(p.source, reverse=p.reverse)
    subwords = pairs.train((side for pair in data.train for side in pair), W=p.vocabulary)
    rows = [pairs.rows(subwords, part, N=p.N) for part in (data.train, data.evaluation)]
    counts = [f"{len(part.source_BS):,} (and {part.longer:,} longer than {p.N} tokens, left out)" for part in rows]
    first = " -> ".join(repr(side[:60]) for side in data.train[0])
    lines = [
        *data.description.splitlines(),
        f"{data.name}: pairs to train on: {counts[0]}; to evaluate: {counts[1]}; vocabulary {subwords.size:,}",
        f"{data.name}: it learns to translate as {first}",
    ]
    common = {
        side: pairs.most_common_words(texts) for side, texts in zip(SIDES, zip(*data.train, strict=True), strict=True)
    }
    return Corpus(data.name, subwords, *rows, *scored(data.evaluation, SCORED), lines, data.sha256, common)


def scored(held_out: list[pairs.Pair], n: int) -> tuple[list[str], list[list[str]]]:
    """Return n of the source sentences (or all), whatever their order in the file, and all translations of each."""
    references: dict[str, list[str]] = {}
    for source, target in held_out:
        references.setdefault(source, []).append(target)
    sources = sorted(references, key=lambda source: hashlib.sha256(source.encode()).digest())[:n]
    return sources, [references[source] for source in sources]


def translator(model: models.Model, subwords: pairs.Subwords, *, N: int, batch: int) -> Callable:
    """Return (params, sentences) -> {"greedy": translations, "beam": translations}; '' for one empty or too long."""

    @jax.jit
    def decode(params: Any, source_BS: jax.Array) -> dict[str, jax.Array]:
        B = len(source_BS)
        prompt = jnp.full((B, 1), pairs.BOS, jnp.int32), jnp.ones(B, jnp.int32)
        start = functools.partial(model.start, params, source_BS, source_BS != pairs.PAD, capacity=N)
        step, options = functools.partial(model.step, params), {"steps": N, "stop": (pairs.EOS,)}
        w_BN, _ = generate.generate(start, step, *prompt, jax.random.key(0), temperature=0.0, **options)
        w_BQN, _ = beam.search(start, step, *prompt, beam=BEAM, length_penalty=LENGTH_PENALTY, **options)
        return {"greedy": w_BN, "beam": w_BQN[:, 0]}

    def translate(params: Any, sentences: list[str]) -> dict[str, list[str]]:
        source_BS, fits_B = pairs.pad(subwords, sentences, N=N)
        translations: dict[str, list[str]] = {"greedy": [], "beam": []}
        for first in range(0, len(sentences), batch):
            index_B = np.minimum(first + np.arange(batch), len(sentences) - 1)  # the last batch repeats the last one
            for name, w_BN in jax.device_get(decode(params, source_BS[index_B])).items():
                translations[name] += map(subwords.decode, w_BN)
        translated = [fits and sentence != "" for fits, sentence in zip(fits_B, sentences, strict=True)]
        return {
            name: [text if fits else "" for text, fits in zip(texts, translated, strict=False)]
            for name, texts in translations.items()
        }

    return translate


def score(translations: dict[str, list[str]], references: list[list[str]]) -> dict[str, float]:
    """Return chrF and BLEU of each way of decoding, and of a guess: the translation of another sentence."""
    texts = {f"eval/{{}}_{name}": texts for name, texts in translations.items()}
    texts["baseline/{}"] = [others[0] for others in references[1:] + references[:1]]
    scores = {name: translation_score.scores(outputs, references) for name, outputs in texts.items()}
    return {name.format(metric): values[metric] for name, values in scores.items() for metric in values}


def figures(
    settings: configs.Settings, corpus: Corpus, model: models.Model, translate: Callable, params, folder, rows
) -> Iterator[pathlib.Path | dict[str, float]]:
    """Yield the scores; loss curves, cross-attention of one sentence if one fits, and a table of translations."""
    from experiments.figures import plots  # it imports matplotlib, which takes a second

    translations = translate(params, corpus.sources)
    bleu_words_by = translation_score.choose_tokenizer(corpus.references)
    yield score(translations, corpus.references) | {"bleu_words_by": bleu_words_by}
    N, title, drawings = settings.pairs.N, f"{settings.experiment}: {corpus.name}", folder / "figures"
    yield plots.loss_curves(drawings / "loss.png", rows, unit="nats per subword", title=title)
    if (maps := cross_attention(corpus, model, params, translations["greedy"], N=N)) is not None:
        title = "cross-attention: the token to be written (row)\nlooks at the source (column)"
        yield plots.attention_matrices(drawings / "cross_attention.png", **maps, title=title, mean=True)
    text = table(corpus, translations)
    disk.write(folder / "sample.txt", f"{text}\n".encode())
    long = int(np.sum(~pairs.pad(corpus.subwords, corpus.sources, N=N)[1]))
    print(f"\n{text}\n\n  chrF and BLEU of {len(corpus.sources):,} held-out sentences, {long:,} of them longer than")
    print(f"  {N} tokens and scored as empty translations; sacrebleu's tokenizer of BLEU is {bleu_words_by}")
    yield folder / "sample.txt"


def table(corpus: Corpus, translations: dict[str, list[str]]) -> str:
    """Return the first sources, their references, and their translations by each way of decoding."""
    blocks = []
    for i, (source, truth) in enumerate(zip(corpus.sources[:SHOWN], corpus.references, strict=False)):
        lines = [f"{name + ':':<7} {texts[i]}" for name, texts in translations.items()]
        blocks.append("\n".join([f"source: {source}", f"truth:  {' / '.join(truth)}", *lines]))
    return "\n\n".join(blocks)


def cross_attention(
    corpus: Corpus, model: models.Model, params: Any, translations: list[str], *, N: int
) -> dict[str, Any] | None:
    """Return the weights and tokens of the first translation that fits and is long enough, or None if none fits."""
    subwords = corpus.subwords
    source_BS, source_fits_B = pairs.pad(subwords, corpus.sources, N=N)
    target_BN, target_fits_B = pairs.pad(subwords, translations, N=N)
    length_B = np.sum(source_BS != pairs.PAD, axis=1) * (source_fits_B & target_fits_B)
    if not length_B.any():
        return None
    b = int(np.argmax(length_B >= min(8, length_B.max())))
    batch = pairs.examples(pairs.Rows(source_BS[b : b + 1], target_BN[b : b + 1], 0))[0](np.arange(1), None)
    inputs = batch["source_BS"], batch["valid_BS"], batch["w_BN"]
    _, aux = jax.jit(functools.partial(model.apply, maps=True))(params, *inputs)
    ids = (row[row != pairs.PAD].tolist() for row in (source_BS[b], target_BN[b]))
    keys, queries = ([subwords.decode([id]) or subwords.name(id) for id in row] for row in ids)
    A_MHNS = np.asarray(aux["A_cross_MBHNS"])[:, 0, :, : len(queries), : len(keys)]
    return {"A_MHNS": A_MHNS, "queries": queries, "keys": keys}
