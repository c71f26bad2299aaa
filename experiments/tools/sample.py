"""Continue a text with a trained model: a run, or a published GPT-2 or Llama model.

python -m experiments.tools.sample --checkpoint=DIR --prompt='Once upon a time'
sample.run("DIR", prompt="Once upon a time")

--prompt=One --prompt=Two continues several texts at once. With --prompt=-, or without a prompt on a terminal, the tool
continues each input line. It prints a text while it draws the tokens, with cached keys and values (E23). In texts
longer than the model's context the window moves: each token depends on the last tokens that fit into the context.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments import command as commands
from experiments.config import errors, settings as configs
from experiments.devices import mesh as meshes
from experiments.dry_run import dry_run as dry_runs, topology as topologies
from experiments.folder import log
from experiments.model import build, checks
from experiments.pretrained import trained
from experiments.tools import generation
from tfm.attention import mask as masks
from tfm.decode import sampling

DEFAULT_TOKENS = 256  # for max_new_tokens = 0
FILTERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # options of tfm.decode
HELP = {
    "prompt": "The text to continue; repeat the flag for several texts. -: each line of the input.",
    "max_new_tokens": "Tokens after each prompt; 0: 256, or fewer if a prefix leaves less of the context.",
    "samples": "Texts for each prompt. The second text equals the first text of seed + 1, and so on.",
    "temperature": "Divides the logits; 0: always the most likely token.",
    "top_k": "Draw from the k most likely tokens; 0: from all.",
    "top_p": "Draw from the most likely tokens whose total probability reaches this number.",
    "min_p": "Draw from tokens at least this many times as probable as the most likely one; 0: from all.",
    "repetition_penalty": "Above 1 (for example 1.2), tokens of the text so far become less likely.",
    "stop": "End the text before this string, or where the model ends it.",
    "seed": "Seed of the random numbers.",
    "topology": "Only compile, for a TPU that this machine may not have: v5e-1.",
    "json": "A file for the compiler's report (with --topology).",
}


class Options(NamedTuple):
    """The options with which texts are drawn. HELP explains the fields."""

    max_new_tokens: int = 0
    samples: int = 1
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: str = ""
    seed: int = 0


class Session(NamedTuple):
    """A model, and the options for drawing texts from it."""

    model: trained.Trained
    generator: generation.Generator
    options: Options


def run(
    checkpoint: commands.Path,
    *,
    prompt: str | Sequence[str] = (),
    topology: str = "",
    json: str = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: commands.Path = "",
    **options: Options,
) -> str | list[str] | None:
    """Print and return the prompt with its continuation: a text if `prompt` is a text and has one sample, else a list.

    HELP explains the arguments. With `topology`, only compile, report memory (also to the file `json`) and return None.
    """
    options, file = check_options(Options(**options)), commands.output(workdir, "sample.txt")
    model = commands.load(checkpoint, trust, None if topology else device, "causal", "prefix")
    if model.tokenizer.has_chat_template:
        print("the prompt is taken as it is, without the model's chat template", file=sys.stderr, flush=True)
    target = topologies.describe(topology) if topology else None
    mesh = meshes.make(data=1, devices=target and target.devices)
    session = Session(model, make_generator(model, mesh, options), options)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if target:
        ids, steps = encode(session, prompts or [""])
        return dry_runs.compile_and_report(generation.requests(session.generator, ids, steps=steps), target, json)
    interactive = prompts == ["-"] or not prompts and sys.stdin is not None and sys.stdin.isatty()
    texts = list(answer_lines(session)) if interactive else draw(session, prompts or [""], options.seed)
    commands.save(separate(texts), file)
    return texts[0] if isinstance(prompt, str) and options.samples == 1 and not interactive else texts


def check_options(options: Options) -> Options:
    """Return the options. Raises UserError if one is out of its range."""
    configs.at_least(1, {"samples": options.samples})
    configs.at_least(0, {"max_new_tokens": options.max_new_tokens})
    configs.at_least(0, {"seed": options.seed}, configs.LARGEST_SEED)
    try:
        sampling.check_options(**{name: getattr(options, name) for name in FILTERS})
    except ValueError as error:
        raise errors.UserError(str(error)) from error
    return options


def make_generator(model: trained.Trained, mesh: Mesh, options: Options) -> generation.Generator:
    """Return a generator with the model's mask, context and end tokens."""

    def mask(length_B: jax.Array | None = None) -> masks.Mask:
        is_prefix = model.kind == "prefix" and length_B is not None
        return build.add_window(model.fields, masks.prefix(length_B) if is_prefix else masks.causal)

    N, stop = model.facts["N"], trained.list_end_ids(model, model.tokenizer)
    context = None if checks.has_unlimited_context(model.fields, N=N) else N
    arguments = {name: getattr(options, name) for name in FILTERS} | {"mesh": mesh, "stop": stop, "context": context}
    return generation.Generator(model.network(), model.params, mask=mask, **arguments)


def encode(session: Session, prompts: Sequence[str]) -> tuple[list[list[int]], int]:
    """Return the token ids of each prompt, and the number of new tokens to draw.

    Raises UserError if a prompt has no token and the model has no id that begins a text. It also raises UserError if
    the model reads prompts as prefixes, in both directions, and a prompt and the new tokens exceed its context.
    """
    model, steps = session.model, session.options.max_new_tokens
    ids = [model.tokenizer.encode(text).tolist() or [model.tokenizer.bos] for text in prompts]
    N, longest, is_prefix = model.facts["N"], max(map(len, ids)), model.kind == "prefix"
    exceeds = is_prefix and N - longest < max(steps, 1)  # a prefix is read in both directions: the window cannot move
    sizes = f"a prefix of {longest} tokens and max_new_tokens = {steps}"
    errors.refuse(
        ([None] in ids, "this model needs a prompt of at least one token. Add --prompt='...'."),
        (exceeds, f"{sizes} exceed the model's context of {N}. Shorten the prompt or decrease max_new_tokens."),
    )
    return ids, steps or min(DEFAULT_TOKENS, N - longest if is_prefix else DEFAULT_TOKENS)


def draw(session: Session, prompts: Sequence[str], seed: int) -> list[str]:
    """Print and return the texts, each a prompt with its continuation. Sample i of each prompt uses seed + i.

    A single text is printed while it is drawn.
    """
    (ids, steps), samples = encode(session, prompts), session.options.samples
    keys = [jax.random.fold_in(jax.random.key(seed + i), b) for b in range(len(ids)) for i in range(samples)]
    prompts, ids = ([row for row in rows for _ in range(samples)] for rows in (prompts, ids))
    rounds = generation.rounds(session.generator, ids, jnp.stack(keys), steps=steps)

    def decode(b: int, new: Iterable[int]) -> Iterator[str]:
        return until(session.model.tokenizer.stream(new, after=ids[b]), session.options.stop)

    if len(prompts) == 1:
        texts = [""]
        for part in itertools.chain(prompts, decode(0, itertools.chain.from_iterable(row for (row,) in rounds))):
            log.say(part)
            texts[0] += part
        log.say("\n")
        return texts
    new = [itertools.chain(*rows) for rows in zip(*rounds, strict=True)]
    texts = [text + "".join(decode(b, new[b])) for b, text in enumerate(prompts)]
    log.say(separate(texts), "\n")
    return texts


def separate(texts: Sequence[str]) -> str:
    """Return the texts, each below a line with its number if there are several."""
    lines = [f"--- text {i} of {len(texts)} ---\n" * (len(texts) > 1) for i in range(1, len(texts) + 1)]
    return "\n\n".join(map("".join, zip(lines, texts, strict=True)))


def answer_lines(session: Session) -> Iterator[str]:
    """Yield the texts that continue each line of the input. Print errors, since the next line may be valid."""
    for number in itertools.count():
        try:
            line = input("> " if sys.stdin.isatty() else "")
            yield from draw(session, [line], session.options.seed + session.options.samples * number)
        except EOFError:
            return
        except errors.UserError as error:
            log.say(f"error: {errors.line(error)}\n")


def until(pieces: Iterator[str], stop: str) -> Iterator[str]:
    """Yield the text before `stop`, or all of it, in pieces. Hold back what may begin `stop` until the next piece."""
    buffer = ""
    for piece in pieces:
        buffer += piece
        if stop and stop in buffer:
            yield buffer[: buffer.index(stop)]
            return
        n = next((n for n in range(min(len(stop) - 1, len(buffer)), 0, -1) if buffer.endswith(stop[:n])), 0)
        yield buffer[: len(buffer) - n]
        buffer = buffer[len(buffer) - n :]
    yield buffer


if __name__ == "__main__":
    commands.main(run, HELP)
