"""Text from a trained model: a run made here, or a published GPT-2, Llama or llama2.c model.

python -m experiments.tools.sample --checkpoint=DIR --prompt='Once upon a time'
sample.run("DIR", prompt="Once upon a time")

--prompt=One --prompt=Two goes on with several texts at once, and --prompt=-, or none on a terminal, with each line that
is typed, until their end. The text is told as it is drawn, each word computed from the cached keys and values of those
before it (E23). Beyond the context of the model the window moves: each word is computed anew from the last ones that
the context holds (generate.window).
"""

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments import model as models
from experiments.compiler import dry_run, topology as topologies
from experiments.engine import config, distributed, errors, log, mesh as meshes
from experiments.pretrained import open_model
from experiments.tools import command
from tfm import layout as layouts
from tfm.attention import mask as masks
from tfm.decode import generate, kv_cache, sampling

AT_ONCE = 8  # words between two looks at what has been drawn
GROWS = 2**14  # tokens of all texts: with fewer, reading empty places costs less than compiling again
MOST = 256  # words, where their number is left open
LONGEST = 1_000_000  # words that may be asked for


@command.tool(
    prompt="The text to go on with; several are drawn together. -: each line that is read.",
    max_new_tokens="Words drawn after each; 0: 256, and after a prefix no more than the context holds.",
    samples="Texts drawn after each prompt; the second is the first of seed + 1, and so on.",
    temperature="0: always the likeliest word.",
    top_k="Only the k likeliest words are drawn; 0: all.",
    top_p="Only the likeliest words that together reach this probability are drawn.",
    min_p="Only words at least so many times as probable as the likeliest are drawn; 0: all.",
    repetition_penalty="Above 1, words that the text has already are less likely: 1.2.",
    stop="The text ends before this one, and in any case where the model ends it.",
    seed="Of what is drawn.",
    topology="Draw nothing, and compile for TPU chips that need not be there: v5e-1.",
    json="With --topology: a file for what the compiler says.",
)
def run(
    checkpoint: str | os.PathLike,
    *,
    prompt: str | Sequence[str] = (),
    max_new_tokens: int = 0,
    samples: int = 1,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: str = "",
    seed: int = 0,
    topology: str = "",
    json: str = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: str | os.PathLike = "",
) -> str | list[str] | None:
    """Go on with the prompt: the whole text; of several prompts, samples or lines a list of texts."""
    config.at_least(1, {"samples": samples}, most=MOST)
    config.check_seed(seed)
    config.check_seed(seed + samples - 1)
    if samples > 1 and temperature == 0:
        raise errors.UserError(f"with temperature = 0 all {samples} samples would be the same: choose one above 0")
    if json and not topology:
        raise errors.UserError("--json is for --topology: a file for what the compiler says")
    chance = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    chance["repetition_penalty"] = repetition_penalty
    config.at_least(0, {"max_new_tokens": max_new_tokens}, most=LONGEST)
    if top_p == 0:
        raise errors.UserError("top_p must be above 0 and at most 1, and 0 is not")
    try:
        sampling.refuse(**chance)
    except ValueError as error:
        raise errors.UserError(str(error)) from error
    model = open_model.open(checkpoint, trust=trust)
    open_model.expect(model, "causal", "prefix")
    words, network, context = open_model.words(model), model.network(), model.facts["N"]
    target = topologies.describe(topology) if topology else None
    chip = meshes.make(data=1, devices=target and target.devices)
    ends, prefix = set(open_model.ends(model, words)), model.kind == "prefix"

    def mask(length_B: jax.Array | None = None) -> masks.Mask:
        read = masks.either(masks.causal, masks.prefix(length_B)) if prefix and length_B is not None else masks.causal
        return models.masked(model.fields, read)

    @functools.cache
    def drawing(steps: int) -> Generator:
        moves = None if models.endless(model.fields, N=context) else context
        how = {"steps": steps, "stop": sorted(ends), "mask": mask, "mesh": chip}
        return Generator(network, model.params, context=moves, **chance, **how)

    def asked(texts: Sequence[str]) -> tuple[Generator, list[list[int]]]:
        """What draws, and the ids of the prompts."""
        ids = [words.encode(text).tolist() for text in texts]
        if words.bos is None and not all(ids):
            raise errors.UserError("this model needs a prompt of at least one token: --prompt='...'")
        ids = [row or [words.bos] for row in ids]
        room = context - max(map(len, ids))
        if prefix and room < max(max_new_tokens, 1):
            raise errors.UserError(
                f"{max_new_tokens or 'any'} tokens after a prefix of {context - room} do not fit into the model's "
                f"context of {context}: {max(room, 0)} do"
            )
        return drawing(max_new_tokens or (min(MOST, room) if prefix else MOST)), ids

    told = itertools.count()

    def tell(texts: Sequence[str]) -> list[str]:
        (of, ids), first = asked(texts), seed + samples * next(told)  # of another line other texts are drawn
        keys = [jax.random.fold_in(jax.random.key(first + i), b) for b in range(len(ids)) for i in range(samples)]
        ids, texts = ([one for one in each for _ in range(samples)] for each in (ids, texts))
        gained = rounds(of, ids, jax.numpy.stack(keys), ends)
        if len(texts) == 1:
            parts, new = [], itertools.chain.from_iterable(new_B[0] for new_B in gained)
            for part in itertools.chain(texts, until(words.stream(new, after=ids[0]), stop), ["\n"]):
                log.say(part)  # as it comes
                parts.append(part)
            return ["".join(parts[:-1])]
        news = [list(itertools.chain(*parts)) for parts in zip(*gained, strict=True)]
        more = ["".join(until(words.stream(new, after=old), stop)) for new, old in zip(news, ids, strict=True)]
        whole = [text + rest for text, rest in zip(texts, more, strict=True)]
        log.say("\n\n".join(whole) + "\n")
        return whole

    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    typed = texts == ["-"] or not texts and sys.stdin is not None and sys.stdin.isatty()
    if topology:
        of, ids = asked(texts or [""])
        B, N = padded(ids, of.context).shape
        return dry_run.compile_and_report(requests(of, B, min(N, context), chip), target, json)
    write = command.output(workdir, "sample.txt")
    whole = list(answers(tell)) if typed else tell(texts or [""])
    write("\n\n".join(whole))
    return whole[0] if isinstance(prompt, str) and samples == 1 and not typed else whole


def answers(tell: Callable[[list[str]], list[str]]) -> Iterator[str]:
    """To each line that is typed; where there is none, the sentence is told, for the next line may be better."""
    while True:
        try:
            yield from tell([input("> " if sys.stdin.isatty() else "")])
        except EOFError:
            return
        except UnicodeDecodeError as error:  # what is behind it cannot be read
            raise errors.UserError(f"what is read is not text in UTF-8: {error}") from error
        except errors.UserError as error:
            log.say(f"error: {errors.line(error)}\n")


def padded(ids: list[list[int]], context: int | None) -> np.ndarray:
    """The prompts, with zeros behind them; few lengths are compiled."""
    longest = max(map(len, ids))
    N = generate.bucket(longest, context if context and longest <= context else None)
    return np.array([row + [0] * (N - len(row)) for row in ids], np.int32)


class Generator:
    """A model that draws words, at most `steps` after each prompt.

    mask(length_B) is for reading the prompts, mask() for what follows; how: arguments of generate.begin and
    generate.more, such as temperature. Of texts longer than `context`, if it is given, each word is drawn after the
    last ones alone. Of many long texts the KV cache begins with a quarter of its places, and gets another one when
    they are filled.
    """

    def __init__(
        self,
        model: models.Model,
        params: Any,
        *,
        steps: int,
        mask: Callable[..., masks.Mask],
        mesh: Mesh | None = None,
        context: int | None = None,
        grows: int = GROWS,
        **how: Any,
    ):
        self.params, self.steps, self.context, self.grows = params, steps, context, grows

        def reads(params: Any, length_B: jax.Array | None, capacity: int) -> generate.Start:
            over = layouts.Layout(platform=meshes.backend(mesh or meshes.make(data=1)))
            return functools.partial(model.start, params, capacity=capacity, mask=mask(length_B), over=over)

        def moving(params: Any, capacity: int) -> tuple[generate.Start, generate.Step]:
            return generate.window(reads(params, None, context), context=context, capacity=capacity)

        def begin(params: Any, prompt_BN: jax.Array, length_B: jax.Array, key: jax.Array) -> generate.State:
            B, N = prompt_BN.shape
            start = moving(params, N + steps)[0] if self.moves(N) else reads(params, length_B, self.places(B, N)[0])
            return generate.begin(start, prompt_BN, length_B, key, steps=steps, **how)

        def more(layers: Any, state: generate.State) -> generate.State:
            return generate.more(functools.partial(step, layers), state, steps=AT_ONCE, **how)

        def move(params: Any, state: generate.State) -> generate.State:
            return generate.more(moving(params, state.w_BN.shape[1])[1], state, steps=AT_ONCE, **how)

        step = self.step = functools.partial(model.step, mask=mask())  # a closure of self would keep params longer
        self.begin = jax.jit(begin)  # (params, prompt_BN, length_B, key) -> state with the first word
        self.more = jax.jit(more, donate_argnums=1)  # (by_layer(params), state) -> AT_ONCE words later
        self.move = jax.jit(move, donate_argnums=1)  # the same of a state whose cache is its text, with params
        self.by_layer = jax.jit(model.by_layer)
        self.grow = jax.jit(kv_cache.grow, static_argnums=1)

    def moves(self, length: int) -> bool:
        """Whether so many tokens are more than the context."""
        return self.context is not None and length > self.context

    def places(self, B: int, N: int) -> tuple[int, int, int]:
        """Of the cache of B prompts of N tokens: how many at first, how many more when they are filled, the most."""
        most = N + self.steps if self.context is None else min(N + self.steps, self.context)
        quarter = max(AT_ONCE, -(-most // 4))
        return most if B * most < self.grows else max(N + AT_ONCE, quarter), quarter, most


def requests(of: Generator, B: int, N: int, chip: Mesh) -> Iterator[topologies.Request]:
    """Reading B prompts of N tokens, and the words that follow, on a chip that need not be there."""
    place = meshes.replicated(chip)

    def abstract(function: Callable, *arguments: Any) -> Any:
        shape = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape)

    prompt_BN, lengths = np.zeros((B, N), np.int32), np.zeros(B, np.int32)
    arguments = abstract(lambda *arrays: (*arrays, jax.random.key(0)), of.params, prompt_BN, lengths)
    name = f"reading {B} x {N} tokens and drawing the first"
    yield topologies.Request(name, of.begin, arguments)
    layers, state = abstract(of.by_layer, of.params), abstract(of.begin, *arguments)
    yield topologies.Request(f"drawing the next {AT_ONCE}, {B} at a time", of.more, (layers, state))


def rounds(of: Generator, ids: list[list[int]], key: jax.Array, ends: set[int]) -> Iterator[list[list[int]]]:
    """In each round the new ids of each text, without those that end it, until every text is done. key: or key_B."""
    params = jax.device_put(of.params)
    layers, prompt_BN = of.by_layer(params), padded(ids, of.context)
    read_B = np.array([len(row) for row in ids])
    moved, whole = of.moves(prompt_BN.shape[1]), read_B.max() + of.steps
    _, quarter, most = of.places(*prompt_BN.shape)
    state = of.begin(params, prompt_BN, read_B, key)
    while True:
        w_BN, length_B, done_B = jax.device_get((state.w_BN, state.length_B, state.done_B))
        new = [row[a:b].tolist() for row, a, b in zip(w_BN, read_B, length_B, strict=True)]
        yield [[word for word in some if word not in ends] for some in new]
        if done_B.all():
            return
        read_B = length_B.copy()  # `more` may write where it lay
        soon = min(int(read_B.max()) + AT_ONCE, whole)
        if not moved and of.moves(soon):
            moved, state = True, state._replace(cache=jax.numpy.copy(state.w_BN))  # for each may be written into
        if moved:
            state = of.move(params, state)
            continue
        if (places := kv_cache.places(state.cache)) < min(soon, most):
            state = state._replace(cache=of.grow(state.cache, min(places + quarter, most)))
        state = of.more(layers, state)


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


if __name__ == "__main__":
    distributed.leave(run.main(sys.argv))
