"""Text from a trained model, told as it is drawn (E24), each word computed from kept keys and values (E23)."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import model as models
from experiments.compiler import topology, topology_report
from experiments.data import vocabulary
from experiments.engine import config, cost, errors, mesh, terminal, workdir
from experiments.engine import run as runs
from experiments.pretrained import open_model
from tfm import head
from tfm.attention import mask as masks
from tfm.decode import generate, kv_cache, sampling

WRITES = False  # nothing, unless --workdir is given
COMPILES = True  # with --topology
AT_ONCE = 8  # words between two looks at what has been drawn
GROWS = 2**14  # tokens of all texts: with fewer, reading empty places costs less than compiling again
MOST = 256  # words, where the config leaves their number open


def run(settings: config.Settings, folder: pathlib.Path | None) -> runs.Result:
    """Go on with the prompts of the config: one is streamed; several are drawn together and told at the end."""
    config.check_seed(settings.seed)
    device = settings.device
    if not topology.asked():
        mesh.start(device)
    made = open_model.open(settings.checkpoint)
    open_model.expect(made, "causal", "prefix")
    words = open_model.words(made)
    texts = prompts(settings)
    ids = [encoded(words, text) for text in texts]
    steps = length(settings.sample.max_new_tokens, max(map(len, ids)), made.facts["N"])
    ends, stop = set(open_model.ends(made, words)), settings.sample.stop
    generator = prepared(settings, made, ids, steps=steps, ends=ends)
    settings.refuse_unused()
    if topology.asked():
        topology_report.show(described(generator))
        return runs.Result(None, {})
    gained = rounds(generator, ids, settings.seed, ends)
    file = workdir.new_file(folder, "sample.txt") if folder is not None else None
    if len(texts) == 1:
        new = itertools.chain.from_iterable(new_B[0] for new_B in gained)
        told = [told_while_drawn(texts[0], until(words.stream(new, after=ids[0]), stop))]
    else:
        whole = [list(itertools.chain(*parts)) for parts in zip(*gained, strict=True)]
        more = ["".join(until(words.stream(new, after=old), stop)) for new, old in zip(whole, ids, strict=True)]
        told = [text + rest for text, rest in zip(texts, more, strict=True)]
        terminal.say("\n\n".join(told) + "\n")
    if file is not None:
        workdir.write_new(file, ("\n\n".join(told) + "\n").encode())
    return runs.Result(folder, {"texts": told})


def prompts(settings: config.Settings) -> list[str]:
    """The texts to go on with."""
    several, one = settings.prompts, settings.prompt
    if several and one:
        raise errors.UserError("prompt and prompts are both set: give one of them")
    if not all(isinstance(text, str) for text in several):
        raise errors.UserError('prompts must be texts, as in --config.prompts=\'["One", "Two"]\'')
    return list(several) or [one]


def encoded(words: vocabulary.Vocabulary, text: str) -> list[int]:
    """The ids of a prompt; of an empty one that of the start, where the model knows one."""
    ids = words.encode(text).tolist()
    if not ids and words.bos is None:
        raise errors.UserError("this model needs a prompt of at least one token: --config.prompt='...'")
    return ids or [words.bos]


def length(asked: int, prompt: int, context: int) -> int:
    """How many words to draw after a prompt of so many. UserError where they do not fit into the context."""
    config.at_least(0, {"sample.max_new_tokens": asked})
    room = context - prompt
    if room < 1:
        raise errors.UserError(f"the prompt has {prompt} tokens, and the context of the model holds {context} in all")
    if asked > room:
        raise errors.UserError(
            f"sample.max_new_tokens = {asked} tokens after a prompt of {prompt} do not fit into the context of "
            f"{context}: {room} do"
        )
    return asked or min(room, MOST)


class Generator(NamedTuple):
    """A model that draws words, at most `steps` after each prompt; its functions are jitted.

    begin(params, prompt_BN, length_B, key) -> state with the first word, and more(layers, state) -> AT_ONCE words
    later, which uses its state up; layers: by_layer(params). Of many long texts the cache begins with a
    `quarter` of its `most` places, and gets another one when they are filled.
    """

    params: Any
    prompt_BN: np.ndarray
    model: models.Model
    mask: Callable[..., masks.Mask]  # mask(length_B) for reading the prompts, mask() for what follows
    most: int
    quarter: int
    begin: Callable[..., generate.State]
    more: Callable[..., generate.State]
    by_layer: Callable[[Any], Any]
    grow: Callable[[Any, int], Any]


def prepared(
    settings: config.Settings, made: open_model.Trained, ids: list[list[int]], *, steps: int, ends: set[int]
) -> Generator:
    """What draws `steps` words after these prompts, checked; `ends` end a text.

    Prompts are padded to the same power of two, so that few lengths are compiled, and one program draws every round.
    """
    fields = open_model.fields(made, config.beside(settings.model, made.model, made.path))
    model = models.language(fields, answer=head.next_word, **made.facts)
    N = generate.bucket(max(map(len, ids)), made.facts["N"])
    prompt_BN = np.array([row + [0] * (N - len(row)) for row in ids], np.int32)
    how = chance(settings) | {"stop": sorted(ends)}

    def mask(length_B: jax.Array | None = None) -> masks.Mask:
        prefix = made.kind == "prefix" and length_B is not None
        return models.masked(fields, masks.either(masks.causal, masks.prefix(length_B)) if prefix else masks.causal)

    return generator(model, open_model.checked(made, model.init), prompt_BN, steps=steps, mask=mask, **how)


def generator(
    model: models.Model, params: Any, prompt_BN: np.ndarray, *, steps: int, mask: Callable[..., masks.Mask], **how: Any
) -> Generator:
    """The functions of a Generator. how: those of decode.begin and decode.more, such as temperature."""
    B, N = prompt_BN.shape
    most = N + steps
    quarter = max(AT_ONCE, -(-most // 4))
    room = most if B * most < GROWS else max(N + AT_ONCE, quarter)

    @jax.jit
    def begin(params: Any, prompt_BN: jax.Array, length_B: jax.Array, key: jax.Array) -> generate.State:
        start = functools.partial(model.start, params, capacity=room, mask=mask(length_B))
        return generate.begin(start, prompt_BN, length_B, key, steps=steps, **how)

    @functools.partial(jax.jit, donate_argnums=1)
    def more(layers: Any, state: generate.State) -> generate.State:
        return generate.more(functools.partial(model.step, layers, mask=mask()), state, steps=AT_ONCE, **how)

    by_layer, grow = jax.jit(kv_cache.by_layer), jax.jit(kv_cache.grow, static_argnums=1)
    return Generator(params, prompt_BN, model, mask, most, quarter, begin, more, by_layer, grow)


def described(of: Generator) -> Iterator[topology.Wanted]:
    """Reading the prompts, and the words that follow, on a chip that need not be there."""
    place = mesh.replicated(mesh.make(data=1))

    def abstract(function: Callable, *arguments: Any) -> Any:
        shape = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape)

    B, N = of.prompt_BN.shape
    lengths = np.zeros(B, np.int32)
    arguments = abstract(lambda *arrays: (*arrays, jax.random.key(0)), of.params, of.prompt_BN, lengths)
    name = f"reading {B} x {N} tokens and drawing the first"
    yield topology.Wanted(name, of.begin, arguments, cost.flops(of.begin, *arguments))
    layers, state = abstract(kv_cache.by_layer, of.params), abstract(of.begin, *arguments)
    step = functools.partial(of.model.step, mask=of.mask())
    flops = AT_ONCE * cost.flops(step, layers, state.cache, state.length_B, state.length_B)
    yield topology.Wanted(f"drawing the next {AT_ONCE}, {B} at a time", of.more, (layers, state), flops)


def rounds(of: Generator, ids: list[list[int]], seed: int, ends: set[int]) -> Iterator[list[list[int]]]:
    """In each round the new ids of each text, without those that end it, until every text is done."""
    params = jax.device_put(of.params)
    layers = of.by_layer(params)
    told_B = np.array([len(row) for row in ids])
    state = of.begin(params, of.prompt_BN, told_B, jax.random.key(seed))
    while True:
        w_BN, length_B, done_B = jax.device_get((state.w_BN, state.length_B, state.done_B))
        new = [row[a:b].tolist() for row, a, b in zip(w_BN, told_B, length_B, strict=True)]
        yield [[word for word in some if word not in ends] for some in new]
        if done_B.all():
            return
        told_B = length_B.copy()  # `more` may write where it lay
        places = kv_cache.places(state.cache)
        if places < min(int(state.length_B.max()) + AT_ONCE, of.most):
            state = state._replace(cache=of.grow(state.cache, min(places + of.quarter, of.most)))
        state = of.more(layers, state)


def chance(settings: config.Settings) -> dict[str, float]:
    """How words are drawn, checked."""
    found = {name: getattr(settings.sample, name) for name in ("temperature", "top_k", "top_p")}
    if found["top_p"] == 0:
        raise errors.UserError("sample.top_p must be above 0 and at most 1, and 0 is not")
    try:
        sampling.refuse(**found)
    except ValueError as error:
        raise errors.UserError(f"sample: {error}") from error
    return found


def until(pieces: Iterator[str], stop: str) -> Iterator[str]:
    """The text before `stop`, in pieces; what may be its beginning is held back until that is known ('': no end)."""
    held = ""
    for piece in pieces:
        held += piece
        if stop and stop in held:
            yield held[: held.index(stop)]
            return
        back = next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:n])), 0)
        yield held[: len(held) - back]
        held = held[len(held) - back :]
    yield held


def told_while_drawn(text: str, pieces: Iterator[str]) -> str:
    """The text and its pieces, each said as it comes; the whole."""
    terminal.say(text)
    parts = [text]
    for piece in pieces:
        terminal.say(piece)
        parts.append(piece)
    terminal.say("\n")
    return "".join(parts)
