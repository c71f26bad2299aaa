"""Text from a trained model: a run made here, or a published GPT-2, Llama or llama2.c model.

python -m experiments.tools.sample --checkpoint=DIR --prompt='Once upon a time'
sample.run("DIR", prompt="Once upon a time")

DIR is a run's folder, a folder with config.json, model.safetensors and tokenizer.json, or stories260K.bin with
tok512.bin beside it. Nothing is written unless a workdir is given. --prompt=One --prompt=Two goes on with several texts
at once. The text is told as it is drawn, each word computed from the cached keys and values of those before it (E23).
"""

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from experiments import model as models
from experiments.compiler import report as compiler_report
from experiments.compiler import topology as topologies
from experiments.engine import compilation, config, distributed, errors, log, mesh
from experiments.pretrained import open_model
from experiments.tools import command
from tfm import layout as layouts
from tfm.attention import mask as masks
from tfm.decode import generate, kv_cache, sampling

AT_ONCE = 8  # words between two looks at what has been drawn
GROWS = 2**14  # tokens of all texts: with fewer, reading empty places costs less than compiling again
MOST = 256  # words, where their number is left open


@command.tool(
    prompt="The text to go on with; several are drawn together.",
    max_new_tokens="Words drawn after each; 0: what the context holds, 256 at most.",
    temperature="0: always the likeliest word.",
    top_k="Only the k likeliest words are drawn; 0: all.",
    top_p="Only the likeliest words that together reach this probability are drawn.",
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
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: str = "",
    seed: int = 0,
    topology: str = "",
    json: str = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: str | os.PathLike = "",
) -> str | list[str] | None:
    """Go on with the prompt: the whole text; of several prompts a list of texts."""
    config.check_seed(seed)
    if json and not topology:
        raise errors.UserError("--json is for --topology: a file for what the compiler says")
    chance = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    config.at_least(0, {"max_new_tokens": max_new_tokens})
    if top_p == 0:
        raise errors.UserError("top_p must be above 0 and at most 1, and 0 is not")
    try:
        sampling.refuse(**chance)
    except ValueError as error:
        raise errors.UserError(str(error)) from error
    model = open_model.open(checkpoint, trust=trust)
    open_model.expect(model, "causal", "prefix")
    words, texts = open_model.words(model), [prompt] if isinstance(prompt, str) else list(prompt) or [""]
    ids = [words.encode(text).tolist() for text in texts]
    if words.bos is None and not all(ids):
        raise errors.UserError("this model needs a prompt of at least one token: --prompt='...'")
    ids, ends = [row or [words.bos] for row in ids], set(open_model.ends(model, words))
    longest, context = max(map(len, ids)), model.facts["N"]
    if longest >= context:
        raise errors.UserError(f"the prompt has {longest} tokens, and the context of the model holds {context} in all")
    if max_new_tokens > context - longest:
        raise errors.UserError(
            f"{max_new_tokens} tokens after a prompt of {longest} do not fit into the model's context of {context}: "
            f"{context - longest} do"
        )
    steps = max_new_tokens or min(context - longest, MOST)
    N = generate.bucket(longest, context)  # so that few lengths are compiled
    prompt_BN = np.array([row + [0] * (N - len(row)) for row in ids], np.int32)

    def mask(length_B: jax.Array | None = None) -> masks.Mask:
        prefix = model.kind == "prefix" and length_B is not None
        return models.masked(
            model.fields, masks.either(masks.causal, masks.prefix(length_B)) if prefix else masks.causal
        )

    how = chance | {"steps": steps, "stop": sorted(ends), "mask": mask}
    drawing = Generator(model.network(), model.params, prompt_BN, **how)
    if topology:
        with topologies.of(topology, json or None):
            return compiler_report.show(described(drawing))
    gained = rounds(drawing, ids, seed, ends)
    write = command.output(workdir, "sample.txt")
    if len(texts) == 1:
        parts, new = [], itertools.chain.from_iterable(new_B[0] for new_B in gained)
        for part in itertools.chain(texts, until(words.stream(new, after=ids[0]), stop), ["\n"]):
            log.say(part)  # as it comes
            parts.append(part)
        whole = ["".join(parts[:-1])]
    else:
        news = [list(itertools.chain(*parts)) for parts in zip(*gained, strict=True)]
        more = ["".join(until(words.stream(new, after=old), stop)) for new, old in zip(news, ids, strict=True)]
        whole = [text + rest for text, rest in zip(texts, more, strict=True)]
        log.say("\n\n".join(whole) + "\n")
    write("\n\n".join(whole))
    return whole[0] if isinstance(prompt, str) else whole


class Generator:
    """A model that draws words, at most `steps` after each prompt.

    mask(length_B) is for reading the prompts, mask() for what follows; how: arguments of generate.begin and
    generate.more, such as temperature. Of many long texts the KV cache begins with a `quarter` of its `most` places,
    and gets another one when they are filled.
    """

    def __init__(
        self,
        model: models.Model,
        params: Any,
        prompt_BN: np.ndarray,
        *,
        steps: int,
        mask: Callable[..., masks.Mask],
        grows: int = GROWS,
        **how: Any,
    ):
        self.params, self.prompt_BN = params, prompt_BN
        B, N = prompt_BN.shape
        self.most = N + steps
        self.quarter = max(AT_ONCE, -(-self.most // 4))
        capacity = self.most if B * self.most < grows else max(N + AT_ONCE, self.quarter)

        def begin(params: Any, prompt_BN: jax.Array, length_B: jax.Array, key: jax.Array) -> generate.State:
            over = layouts.Layout(platform=mesh.backend(mesh.make(data=1)))  # when it is made: `described` has chips
            start = functools.partial(model.start, params, capacity=capacity, mask=mask(length_B), over=over)
            return generate.begin(start, prompt_BN, length_B, key, steps=steps, **how)

        def more(layers: Any, state: generate.State) -> generate.State:
            return generate.more(functools.partial(step, layers), state, steps=AT_ONCE, **how)

        step = self.step = functools.partial(model.step, mask=mask())  # a closure of self would keep params longer
        self.begin = jax.jit(begin)  # (params, prompt_BN, length_B, key) -> state with the first word
        self.more = jax.jit(more, donate_argnums=1)  # (by_layer(params), state) -> AT_ONCE words later
        self.by_layer = jax.jit(model.by_layer)
        self.grow = jax.jit(kv_cache.grow, static_argnums=1)


def described(of: Generator) -> Iterator[topologies.Request]:
    """Reading the prompts, and the words that follow, on a chip that need not be there."""
    place = mesh.replicated(mesh.make(data=1))

    def abstract(function: Callable, *arguments: Any) -> Any:
        shape = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape)

    B, N = of.prompt_BN.shape
    lengths = np.zeros(B, np.int32)
    arguments = abstract(lambda *arrays: (*arrays, jax.random.key(0)), of.params, of.prompt_BN, lengths)
    name = f"reading {B} x {N} tokens and drawing the first"
    yield topologies.Request(name, of.begin, arguments, compilation.flops(of.begin, *arguments))
    layers, state = abstract(of.by_layer, of.params), abstract(of.begin, *arguments)
    flops = AT_ONCE * compilation.flops(of.step, layers, state.cache, state.length_B, state.length_B)
    yield topologies.Request(f"drawing the next {AT_ONCE}, {B} at a time", of.more, (layers, state), flops)


def rounds(of: Generator, ids: list[list[int]], seed: int, ends: set[int]) -> Iterator[list[list[int]]]:
    """In each round the new ids of each text, without those that end it, until every text is done."""
    params = jax.device_put(of.params)
    layers = of.by_layer(params)
    read_B = np.array([len(row) for row in ids])
    state = of.begin(params, of.prompt_BN, read_B, jax.random.key(seed))
    while True:
        w_BN, length_B, done_B = jax.device_get((state.w_BN, state.length_B, state.done_B))
        new = [row[a:b].tolist() for row, a, b in zip(w_BN, read_B, length_B, strict=True)]
        yield [[word for word in some if word not in ends] for some in new]
        if done_B.all():
            return
        read_B = length_B.copy()  # `more` may write where it lay
        places = kv_cache.places(state.cache)
        if places < min(int(state.length_B.max()) + AT_ONCE, of.most):
            state = state._replace(cache=of.grow(state.cache, min(places + of.quarter, of.most)))
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
