"""Resolve names in a config to variants and experiments, built in or the user's."""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import os
import pathlib
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from experiments.config import errors

ROOT = pathlib.Path(__file__).parents[2]
CODE = re.compile(r"[\w.]+:[^\W\d]\w*")  # names the user's code: my_file:my_variant
HUB = "hub:"  # prefix of the name of a data set of the Hugging Face hub, which is no code
SHARED = re.compile(r"\s*(.+):(\d*\.?\d+)\s*")  # a source and its share
# setting: its names in other projects (nanoGPT, Hugging Face, big_vision, MaxText), and value=names of the value there
# and in papers. "_" and "-" do not count. "*": values of any setting.
FOREIGN = """
optim.learning_rate: lr max_lr base_lr peak_lr
optim.weight_decay: wd adam_weight_decay
optim.betas: b1 b2 beta1 beta2 adam_beta1 adam_beta2 adam_b1 adam_b2
optim.clip: grad_clip grad_clip_norm max_grad_norm gradient_clipping clip_norm
optim.warmup_steps: warmup warmup_iters num_warmup_steps
optim.schedule: lr_schedule lr_scheduler lr_scheduler_type decay_type
    cosine=cosinedecay,cosineannealing,cosinewithwarmup,warmupcosine,warmupcosinedecay
    linear=lineardecay,linearwithwarmup,linearwarmup wsd=warmupstabledecay,trapezoidal,trapezoid
optim.name: optimizer optimiser opt_type adamw=adam,adamwtorch,adamwtorchfused,fusedadamw
model.M: n_layer n_layers num_layers num_hidden_layers layers depth num_decoder_layers
model.D: n_embd n_embed d_model hidden_size width dim embed_dim emb_dim hidden_dim base_emb_dim
model.H: n_head n_heads num_heads num_attention_heads heads num_query_heads
model.G: n_kv_head n_kv_heads num_kv_heads num_key_value_heads
model.K: head_dim d_head d_kv
model.F: n_inner mlp_dim d_ff ffn_dim intermediate_size
model.norm: token=layernorm,layer,ln rms=rmsnorm,llamarmsnorm batch=batchnorm,bn dyt=dynamictanh
model.mlp: activation hidden_act activation_function act silu=swish relu_squared=relu2,squaredrelu,sqrelu
    gelu_tanh=gelunew,gelupytorchtanh,gelufast,geluapproximate,tanhgelu swiglu=glu,siluglu,gatedsilu
    geglu=glu,gegelu,gatedgelu reglu=glu,gatedrelu
model.block: pre_norm=pre,preln,prelayernorm,normfirst post_norm=post,postln,postlayernorm
model.position: learned=absolute,learned,learnable,wpe,trainable
    sinusoidal=sin,sincos,sincos2d,sinusoid,sinusoidal,fixed none=nope
model.relative_position: rope_theta rotary=rope,rotary,rotaryembedding,rotaryemb,rotaryposemb,gptj
    rotary_halves=rope,ropeneox,neox,rotatehalf,llamarope buckets=t5,t5bias,relativebias,t5relative alibi=alibi
model.score: asymmetric_qknorm=qknorm,qklayernorm,qkrmsnorm,useqknorm,normalizeqk
    asymmetric=sdpa,dotproduct,scaleddotproduct,softmax,standard,vanilla,untied tied=symmetric,sharedqk,tiedqk
    pairwise_sym=symmetric
model.attention: flash=flashattention,flashattention2,flashattention3,flashattn,sdpa,memoryefficient,xformers
    explicit=eager,naive,math,dotproduct
model.compute_dtype: dtype precision bf16 mixed_precision float32=fp32,f32 bfloat16=bf16
model.remat: full=block,gradientcheckpointing
text.N: block_size seq_len seq_length max_length context_length max_seq_len n_ctx max_position_embeddings
text.source: dataset dataset_name data data_path data_dir train_file
text.objective: causal=clm,lm,autoregressive,nexttoken masked=mlm,bert,cloze
text.tokenizer: vocab_size tokenizer_name tokenizer_path characters=char,chars
text.head: tie_word_embeddings tie_weights weight_tying linear=untied tied=shared,tieembeddings,tiewordembeddings
image.head: class_token=cls,clstoken,token,tok pooled=gap,avg,mean,average,globalaverage
image.patch: patch_size
train.steps: max_iters max_steps total_steps num_steps iters iterations num_train_steps epochs num_train_epochs
train.batch_size: bs per_device_train_batch_size global_batch_size per_device_batch_size device_batch_size
train.accumulation: gradient_accumulation_steps grad_accum grad_accum_steps accumulate
train.evaluate_every: eval_interval eval_steps eval_every eval_freq
train.log_every: log_interval logging_steps log_freq log_training_steps
train.save_every: save_steps save_interval checkpoint_every ckpt_steps checkpoint_period
init_from: pretrained checkpoint ckpt model_name_or_path load_from
seed: random_seed rng_seed
log: report_to wandb_log use_wandb logger
*: full=true,yes,on,all all=true,yes,on none=false,no,off
"""
# Parts that we lack: similar names are other parts.
LACKING = "elu selu celu prelu leakyrelu mish softplus sigmoid groupnorm float16 fp16 float64 inversesqrt".split()
# A similar name with another of these beginnings is the opposite, or no part at all.
SIGNS = re.compile(r"^(asym|anti|un|none?$|no_|non_|pre|post)")


def translate(name: str) -> list[str]:
    """Return our settings, and our values as "model.norm=token", that other projects call `name`.

    An entry without a setting, "=none", is a value that any setting may have.
    """
    ours, setting, plain = [], "", _simplify(name.rpartition(".")[2])
    for word in FOREIGN.split():
        value, equals, names = word.rpartition("=")
        if word.endswith(":"):
            setting = word.strip("*:")
        elif plain in map(_simplify, names.split(",")):
            ours.append(f"{setting}{equals}{value}")
    return ours


def find_settings(name: str, settings: Iterable[str]) -> list[str]:
    """Return the settings that other projects call `name`, or that are called `name` in their section."""
    ours, plain = translate(name), _simplify(name.rpartition(".")[2])
    return [setting for setting in settings if setting in ours or _simplify(setting.rpartition(".")[2]) == plain]


def _simplify(name: str) -> str:
    """Return a name in lower case, with letters and digits only."""
    return re.sub(r"[\W_]", "", name.lower())


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Return ' (did you mean "steps"?)' if an allowed name is similar, or is what another project calls `name`.

    A value of another setting is suggested with it: "model.relative_position=rotary". Opposites, such as pre_norm and
    post_norm, are not similar. Return "" if no name is similar.
    """
    allowed, plain = list(allowed), _simplify(name)
    values = [entry.partition("=") for entry in translate(name) if "=" in entry]
    # Before difflib, for which "d" is as far from "D" as from "M".
    similar = [one for one in allowed if _simplify(one) == plain][:1]
    similar = similar or [value for _, _, value in values if value in allowed]
    similar = similar or find_settings(name, allowed)[:1] or ["".join(entry) for entry in values if entry[0]]
    if not similar and plain not in LACKING:
        alike = [one for one in allowed if SIGNS.findall(one) == SIGNS.findall(name.lower().replace("ass", "as"))]
        similar = difflib.get_close_matches(name, alike, n=1, cutoff=0.55)
    names = '" or "'.join(similar)
    return f' (did you mean "{names}"?)' if names else ""


def split_sources(text: str) -> list[tuple[str, float]]:
    """Return the sources of text.source with their shares, which sum to 1; of "a.txt:7, b.txt:3" 0.7 and 0.3.

    Several sources are separated by commas, each with its share. Any other text is one source. Raises UserError if a
    share is 0.
    """
    matches = [SHARED.fullmatch(item) for item in text.split(",")]
    if len(matches) == 1 or not all(matches):
        return [(text, 1.0)]
    total = sum(float(match[2]) for match in matches)
    problem = f"text.source = {text}: every share must be above 0, as in a.txt:0.7, b.txt:0.3"
    errors.refuse((not all(float(match[2]) for match in matches), problem))
    return [(match[1], float(match[2]) / total) for match in matches]


def is_reader(source: str) -> bool:
    """Return True if a source of data has the form my_file:my_reader, a function of the user's; not for "hub:NAME"."""
    return CODE.fullmatch(source) is not None and not source.startswith(HUB)


def candidates(module: Any) -> dict[str, Any]:
    """Return {name: variant} of a module: its public attributes that are named tuples with a field `init`."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, tuple) and hasattr(value, "init")
    }


def choose(kind: str, name: str, allowed: Mapping[str, Any], setting: str = "") -> Any:
    """Return the allowed variant called `name`, or import the user's, "my_file:my_variant".

    The user's variant must have the form of the allowed ones, and is accepted only if these are functions or tuples of
    functions. For messages: kind is a noun for the variants; setting is the setting's key if that noun does not name
    it. Raises UserError if the name is unknown or the user's variant is invalid.
    """
    if name in allowed:
        return allowed[name]
    example, (module, colon, attribute) = next(iter(allowed.values())), name.partition(":")
    accepts_users = callable(example) or hasattr(example, "_fields")
    if not (colon and accepts_users):
        names = ", ".join(allowed) + (f", or my_file:my_{kind}" if accepts_users else "")
        place = f" in {setting}" if setting else ""
        raise errors.UserError(f'unknown {kind} "{name}"{place}{suggest(name, allowed)}; choose one of: {names}')
    if not CODE.fullmatch(name):
        raise errors.UserError(f'the {kind} "{name}" must have the form my_file:my_variant{suggest(module, allowed)}')
    loaded = import_user_module(kind, name, module.removesuffix(".py"), attribute)
    return _as_variant(f'the {kind} "{name}"', getattr(loaded, attribute), example)


def _as_variant(label: str, variant: Any, example: Any) -> Any:
    """Return the user's variant as a named tuple of the type of `example`; if that is a function, as it is.

    The variant may be a plain tuple, or an object with the tuple's fields as attributes. Fields with a default may be
    missing. Raises UserError for anything else.
    """
    fields = getattr(example, "_fields", ())
    required = [field for field in fields if field not in example._field_defaults]
    if required and not isinstance(variant, type(example)):
        if all(hasattr(variant, field) for field in required):
            variant = type(example)(**{field: getattr(variant, field) for field in fields if hasattr(variant, field)})
        elif isinstance(variant, tuple) and len(required) <= len(variant) <= len(fields):
            variant = type(example)(*variant)
    if not all(hasattr(variant, field) for field in required) or (callable(example) and not callable(variant)):
        form = f"a tuple ({', '.join(required)}), or an object with these attributes" if required else "a function"
        raise errors.UserError(f"{label} is of the type {type(variant).__name__}. It must be {form}")
    return variant


def import_user_module(kind: str, name: str, module: str, *attributes: str) -> ModuleType:
    """Import a module of the user's. Raises UserError if it fails, or if it lacks one of these attributes.

    The module may be in the working directory, in the folder of the config, or installed. kind, name: what the config
    names, for messages, such as "norm" and "my_file:my_norm".
    """
    _search_working_directory()
    label = f'the {kind} "{name}" cannot be imported'
    with user_errors(label):
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # the module exists, and imports one that does not
                raise
            folders = [path for path in sys.path if is_user_code(f"{path}{os.sep}") and os.path.isdir(path or ".")]
            places = ", ".join(dict.fromkeys(map(os.path.abspath, folders)))
            raise errors.UserError(f"{label}: there is no {module.replace('.', os.sep)}.py in {places}") from error
    file = getattr(loaded, "__file__", None) or module
    errors.refuse(*((not hasattr(loaded, name), f"{label}: {file} has no {name}") for name in attributes))
    return loaded


def _search_working_directory() -> None:
    """Let Python import from the working directory, as the command `python` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def load_experiment(name: str) -> ModuleType:
    """Return the experiment of this name: experiments/<name>.py, or a file of the user's.

    It has config() -> {section: its fields} and prepare(settings, mesh) -> runs.Work. Only the built-in study,
    ablation, has run() instead of prepare. The user's file is in one of the places of `import_user_module`. Raises
    UserError if there is no such experiment, or if the user's file fails or lacks config or prepare.
    """
    if is_user_experiment(name):
        return import_user_module("experiment", name, name, "config", "prepare")
    names = list_experiments()
    rule = f"choose one of: {', '.join(names)}, or a file of yours next to the config"
    errors.refuse((name not in names, f'unknown experiment "{name}"{suggest(name, names)}; {rule}'))
    return importlib.import_module(f"experiments.{name}")


def list_experiments() -> list[str]:
    """Return the names of the built-in experiments."""
    return sorted(file.stem for file in (ROOT / "experiments").glob("[a-z]*.py") if file.stem != "command")


def is_user_experiment(name: str) -> bool:
    """Return True if `name` is no built-in experiment, and the first part of its dotted name can be imported.

    Nothing is imported.
    """
    if name in list_experiments() or not all(part.isidentifier() for part in name.split(".")):
        return False
    _search_working_directory()
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


@contextlib.contextmanager
def user_errors(
    label: str, *, all_is_users: bool = True, explain: Callable[[BaseException], str] | None = None
) -> Iterator[None]:
    """Context manager: convert an exception of the user's code into a UserError, "LABEL: my_file.py, line 3: ...".

    UserError, RunError and KeyboardInterrupt pass unchanged. all_is_users: whether the block runs only the user's code.
    If False, only exceptions whose traceback has a line of the user's files are converted. explain: returns the
    sentence about an exception; None: `describe_error`.
    """
    try:
        yield
    except (errors.UserError, errors.RunError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # also a SystemExit, which would end the process without a message
        line = find_user_line(error)
        if not (line or all_is_users):
            raise
        place = line if line.startswith(label) else f"{label}: {line}"
        raise errors.UserError(f"{place}{(explain or describe_error)(error)}") from error


def find_user_line(error: BaseException) -> str:
    """Return the last line of the user's code in a traceback, as "my_file.py, line 3: ", or ""."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    return "".join(f"{f.filename}, line {f.lineno}: " for f in frames[-1:])


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an exception as one line, cut after 400 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...")


def describe_callback(message: str) -> str:
    """Return "a callback raised an exception: my_file.py, line 3: ..."; "" if the message contains no traceback.

    message: of a JaxRuntimeError. JAX replaces an exception that jax.debug.callback, pure_callback or io_callback
    raises by its formatted traceback.
    """
    _, heading, text = message.partition("Traceback (most recent call last):")
    if not heading:
        return ""
    frames = re.findall(r'^ +File "(.+)", line (\d+)', text, flags=re.MULTILINE)
    places = [f"{file}, line {line}: " for file, line in frames if is_user_code(file)]
    exceptions = [line for line in text.splitlines() if line[:1].strip()]  # frames and their source are indented
    return f"a callback raised an exception: {''.join(places[-1:])}{(exceptions or ['no message'])[0]}"


def is_user_code(file: str) -> bool:
    """Return True for a file that is neither installed nor part of this project, whose configs count as the user's.

    The path may be relative, and have symbolic links. A generated file, such as "<string>", is not the user's.
    """
    return not file.startswith("<") and not os.path.realpath(file).startswith(_other_code())


@functools.cache
def _other_code() -> tuple[str, ...]:
    """Return the real path prefixes of code that is not the user's: installed, or the project's."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [*installed, *(ROOT / package for package in ("tfm", "experiments", "benchmarks"))]
    return (*(os.path.join(os.path.realpath(folder), "") for folder in folders), os.path.realpath(ROOT / "launch.py"))
