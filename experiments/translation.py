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
from ml_collections import ConfigDict

from experiments import model as models, task as tasks
from experiments.data import pairs, translation_score
from experiments.engine import config as configs, disk, run
from tfm.attention import mask as masks
from tfm.decode import beam, generate

BEAM = 4  # translations kept by beam search
LENGTH_PENALTY = 0.6  # beam search divides log p by ((5 + length) / 6) to this power (Wu et al. 2016)
SHOWN = 12  # translations in sample.txt
SCORED = 500  # held-out source sentences, or all, that are translated for chrF and BLEU
SIDES = "source", "target"
ANOTHER = "always the translation of another sentence"


class Corpus(NamedTuple):
    """Sentence pairs as ids, and the held-out sentences that are translated, each with all its translations."""

    name: str
    subwords: pairs.Subwords
    train: pairs.Rows
    evaluation: pairs.Rows
    sources: list[str]
    references: list[list[str]]
    lines: list[str]
    sha256: str  # of the pairs
    words: dict[str, list[str]]  # the commonest of source and target


def config() -> dict[str, ConfigDict]:
    """The sentence pairs, and how they are decoded and scored."""
    pairs = ConfigDict()
    pairs.source = "spa-eng"  # spa-eng (English-Spanish), or a path to tab-separated text, a folder or a zip of such
    pairs.reverse = False  # the second column, or the language that comes second in the alphabet, is the source
    pairs.vocabulary = 4096  # subwords of both languages together, the 3 specials and the 256 bytes included
    pairs.N = 24  # tokens of a side, its [EOS] included; training leaves longer pairs out
    return {"pairs": pairs}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The sentence pairs, the model, what is measured."""
    translation_score.metrics()  # a missing library is said before the training, not after it
    corpus = read(settings)
    p, W = settings.pairs, corpus.subwords.size
    layout, padding = models.layout(settings.model, devices, W=W), masks.padding(np.ones((1, p.N), bool))
    model = models.encoder_decoder(settings.model, W=W, N=p.N, tied_output=True, layout=layout, mask=padding)
    parts = tasks.parts(settings, *map(pairs.examples, (corpus.train, corpus.evaluation)), tokens=2 * p.N)
    count_W = np.bincount(corpus.train.target_BN.ravel(), minlength=W)
    count_W[pairs.PAD] = 0

    def hidden(params: Any, batch: dict, **options: Any) -> Any:
        return model.hidden(params, batch["source_BS"], batch["valid_BS"], batch["w_BN"], **options)

    task = tasks.of_tokens(
        settings,
        model,
        hidden,
        few=True,  # sides are filled up
        baseline={"accuracy": tasks.always(parts["evaluation"], W=W, answer=count_W.argmax())},
        guess={"accuracy": "always the training part's most frequent token", "chrf": ANOTHER, "bleu": ANOTHER},
        layout=layout,
        maps=None,
        **parts,
    )
    files = {"tokenizer.json": corpus.subwords.library.to_str(pretty=True).encode()}
    files[run.DATA] = disk.as_json(corpus.words)
    at_once = tasks.at_once(settings.train, 2 * p.N, len(corpus.sources))
    translate = translator(model, corpus.subwords, N=p.N, batch=at_once)
    show = functools.partial(figures, settings, corpus, model, translate)
    return run.Work(
        task,
        show,
        lambda params, batch: model.logits(params, hidden(params, batch)[0]),
        files,
        lines=corpus.lines,
        data_sha256=corpus.sha256,
    )


def read(settings: configs.Settings) -> Corpus:
    """The pairs of the config; subwords come from the training part. Says how many pairs are longer than pairs.N."""
    p = settings.pairs
    configs.at_least(2, {"pairs.N": p.N})  # a word and its [EOS]
    loaded = pairs.load(p.source, reverse=p.reverse)
    made = pairs.train((side for pair in loaded.train for side in pair), W=p.vocabulary)
    rows = [pairs.rows(made, part, N=p.N) for part in (loaded.train, loaded.evaluation)]
    counts = [f"{len(r.source_BS):,} (and {r.longer:,} longer than {p.N} tokens, left out)" for r in rows]
    told = f"{loaded.name}: pairs to train on: {counts[0]}; to evaluate: {counts[1]}; vocabulary {made.size:,}"
    first = " -> ".join(repr(side[:60]) for side in loaded.train[0])
    lines = [*loaded.said.splitlines(), told, f"{loaded.name}: it learns to translate as {first}"]
    words = {side: pairs.commonest(some) for side, some in zip(SIDES, zip(*loaded.train, strict=True), strict=True)}
    return Corpus(loaded.name, made, *rows, *asked(loaded.evaluation, SCORED), lines, loaded.sha256, words)


def asked(held_out: list[pairs.Pair], n: int) -> tuple[list[str], list[list[str]]]:
    """n of the source sentences (or all) and the translations of each, whatever their order in the file."""
    found: dict[str, list[str]] = {}
    for source, target in held_out:
        found.setdefault(source, []).append(target)
    sources = sorted(found, key=lambda source: hashlib.sha256(source.encode()).digest())[:n]
    return sources, [found[source] for source in sources]


def translator(model: models.Model, words: pairs.Subwords, *, N: int, batch: int) -> Callable:
    """(params, sentences) -> {'greedy': translations, 'beam': translations}; of one that is empty or too long: ''."""

    @jax.jit
    def decoded(params: Any, source_BS: jax.Array, valid_BS: jax.Array) -> dict[str, jax.Array]:
        B = len(source_BS)
        begin = jnp.full((B, 1), pairs.BOS, jnp.int32), jnp.ones(B, jnp.int32)
        start = functools.partial(model.start, params, source_BS, valid_BS, capacity=N)
        search = functools.partial(model.step, params)
        how = {"steps": N, "stop": (pairs.EOS,)}
        w_BN, _ = generate.generate(start, search, *begin, jax.random.key(0), temperature=0.0, **how)
        w_BQN, _ = beam.search(start, search, *begin, beam=BEAM, length_penalty=LENGTH_PENALTY, **how)
        return {"greedy": w_BN, "beam": w_BQN[:, 0]}

    def translate(params: Any, sentences: list[str]) -> dict[str, list[str]]:
        source_BS, fits_B = pairs.padded(words, sentences, N=N)
        found: dict[str, list[str]] = {}
        for first in range(0, len(sentences), batch):
            index_B = np.minimum(first + np.arange(batch), len(sentences) - 1)
            some = jax.device_get(decoded(params, source_BS[index_B], source_BS[index_B] != pairs.PAD))
            for way in sorted(some, reverse=True):  # greedy comes first
                found.setdefault(way, []).extend(map(words.decode, some[way]))
        asked = [fits and sentence != "" for fits, sentence in zip(fits_B, sentences, strict=True)]
        ways = {way: zip(some, asked, strict=False) for way, some in found.items()}  # behind the last, it comes again
        return {way: [text if one else "" for text, one in some] for way, some in ways.items()}

    return translate


def score(found: dict[str, list[str]], references: list[list[str]]) -> dict[str, float]:
    """chrF and BLEU of each way of decoding, and of a guess that ignores the source: the translation of another one."""
    every = {f"eval/{{}}_{way}": translations for way, translations in found.items()}
    every["baseline/{}"] = [some[0] for some in references[1:] + references[:1]]
    scores = {name: translation_score.scores(some, references) for name, some in every.items()}
    return {name.format(metric): of[metric] for name, of in scores.items() for metric in of}


def table(corpus: Corpus, found: dict[str, list[str]]) -> str:
    """Source, what people made of it, and what each way of decoding makes of it, for the first sentences."""
    blocks = []
    for i, (source, truth) in enumerate(zip(corpus.sources[:SHOWN], corpus.references, strict=False)):
        ways = [f"{way + ':':<7} {translations[i]}" for way, translations in found.items()]
        blocks.append("\n".join([f"source: {source}", f"truth:  {' / '.join(truth)}", *ways]))
    return "\n\n".join(blocks)


def figures(
    settings, corpus: Corpus, model: models.Model, translate: Callable, params, folder: pathlib.Path, rows: list[dict]
) -> Iterator[pathlib.Path | dict[str, float]]:
    """Loss curves, cross-attention of one sentence where one fits, a table of translations; and the scores."""
    from experiments.figures import plots  # matplotlib, only where something is drawn

    N, words = settings.pairs.N, folder / "sample.txt"
    title = f"{settings.experiment}: {corpus.name}"
    found = translate(params, corpus.sources)
    words_by = translation_score.words_by(corpus.references)
    yield score(found, corpus.references) | {"bleu_words_by": words_by}
    yield plots.loss_curves(folder / "figures" / "loss.png", rows, unit="nats per subword", title=title)
    _, fits_B = pairs.padded(corpus.subwords, corpus.sources, N=N)
    if (seen := look(corpus, model, params, found["greedy"], N=N)) is not None:
        title = "cross-attention: the token to be written (row)\nlooks at the source (column)"
        file = folder / "figures" / "cross_attention.png"
        yield plots.attention_matrices(file, **seen, title=title, mean=True)
    text, long = table(corpus, found), int(np.sum(~fits_B))
    disk.write(words, f"{text}\n".encode())
    print(f"\n{text}\n\n  chrF and BLEU of {len(fits_B):,} held-out sentences, {long:,} of them longer than")
    print(f"  {N} tokens, which count as translated by nothing; the words of BLEU are sacrebleu's {words_by}")
    yield words


def look(corpus: Corpus, model: models.Model, params: Any, found: list[str], *, N: int) -> dict[str, Any] | None:
    """The cross-attention while a sentence is translated: the first whose sides fit and that has enough words."""
    source_BS, fits_B = pairs.padded(corpus.subwords, corpus.sources, N=N)
    target_BN, whole_B = pairs.padded(corpus.subwords, found, N=N)
    length_B = np.sum(source_BS != pairs.PAD, axis=1) * (fits_B & whole_B)
    if not length_B.any():
        return None
    b = int(np.argmax(length_B >= min(8, length_B.max())))
    batch = pairs.examples(pairs.Rows(source_BS[b : b + 1], target_BN[b : b + 1], 0))[0](np.arange(1), None)
    inputs = batch["source_BS"], batch["valid_BS"], batch["w_BN"]
    _, seen = jax.jit(functools.partial(model.apply, maps=True))(params, *inputs)
    of, sides = corpus.subwords, (source_BS[b], target_BN[b])
    keys, queries = ([of.decode([i]) or of.name(i) for i in row[row != pairs.PAD].tolist()] for row in sides)
    A_MHNS = np.asarray(seen["A_cross_MBHNS"])[:, 0, :, : len(queries), : len(keys)]
    return {"A_MHNS": A_MHNS, "queries": queries, "keys": keys}
