"""Resolve names in a config to variants and experiments, built in or the user's."""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import os
import pathlib
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from experiments.engine import errors

ROOT = pathlib.Path(__file__).parents[2]
CODE = re.compile(r"[\w.]+:[^\W\d]\w*")  # the user's code: my_file:my_variant
# Our names of settings -> their names in other projects (nanoGPT, Hugging Face, big_vision, MaxText).
ELSEWHERE = {
    "optim.learning_rate": "lr max_lr base_lr peak_lr",
    "optim.weight_decay": "wd adam_weight_decay",
    "optim.betas": "b1 b2 beta1 beta2 adam_beta1 adam_beta2 adam_b1 adam_b2",
    "optim.clip": "grad_clip grad_clip_norm max_grad_norm gradient_clipping clip_norm",
    "optim.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "optim.schedule": "lr_schedule lr_scheduler lr_scheduler_type decay_type",
    "optim.name": "optimizer optimiser opt_type",
    "model.M": "n_layer n_layers num_layers num_hidden_layers layers depth num_decoder_layers",
    "model.D": "n_embd n_embed d_model hidden_size width dim embed_dim emb_dim hidden_dim base_emb_dim",
    "model.H": "n_head n_heads num_heads num_attention_heads heads num_query_heads",
    "model.G": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads",
    "model.K": "head_dim d_head d_kv",
    "model.F": "n_inner mlp_dim d_ff ffn_dim intermediate_size",
    "model.mlp": "activation hidden_act activation_function act",
    "model.compute_dtype": "dtype precision bf16 mixed_precision",
    "model.relative_position": "rope_theta",
    "text.N": "block_size seq_len seq_length max_length context_length max_seq_len n_ctx max_position_embeddings",
    "text.source": "dataset dataset_name data data_path data_dir train_file",
    "text.tokenizer": "vocab_size tokenizer_name tokenizer_path",
    "text.head": "tie_word_embeddings tie_weights weight_tying",
    "image.patch": "patch_size",
    "train.steps": "max_iters max_steps total_steps num_steps iters iterations num_train_steps epochs num_train_epochs",
    "train.batch_size": "bs per_device_train_batch_size global_batch_size per_device_batch_size device_batch_size",
    "train.accumulation": "gradient_accumulation_steps grad_accum grad_accum_steps accumulate",
    "train.evaluate_every": "eval_interval eval_steps eval_every eval_freq",
    "train.log_every": "log_interval logging_steps log_freq log_training_steps",
    "train.save_every": "save_steps save_interval checkpoint_every ckpt_steps checkpoint_period",
    "init_from": "pretrained checkpoint ckpt model_name_or_path load_from",
    "seed": "random_seed rng_seed",
    "log": "report_to wandb_log use_wandb logger",
}


def elsewhere(name: str, right: Iterable[str] = ELSEWHERE) -> list[str]:
    """Return our name of a setting of another project, or of one whose section was left out; [] if there is none."""
    last = name.rpartition(".")[2].lower()
    return [key for key in right if last in ELSEWHERE.get(key, "").split() or key.partition(".")[2].lower() == last]


def nearest(name: str, right: Iterable[str]) -> str:
    """Return ' (did you mean "steps"?)' if a right name is near, or another project's name of a right one, else ''."""
    right = list(right)
    same = [other for other in right if other.lower() == name.lower()]  # d and D are as far apart as d and M
    found = same or elsewhere(name, right) or difflib.get_close_matches(name, right, n=1, cutoff=0.5)
    return f' (did you mean "{found[0]}"?)' if found else ""


def candidates(module: Any) -> dict[str, Any]:
    """Return the variants of a package: its public attributes that are tuples of functions, `init` among them."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, tuple) and hasattr(value, "init")
    }


def choose(what: str, name: str, right: Mapping[str, Any]) -> Any:
    """Return the variant called `name`. A function or a tuple of functions may be the user's: "my_file:my_variant"."""
    like = next(iter(right.values()))
    open_to_all = callable(like) or hasattr(like, "_fields")
    if ":" not in name or not open_to_all:
        if name not in right:
            listed = ", ".join(right) + (f", or my_file:my_{what}" if open_to_all else "")
            raise errors.UserError(f'unknown {what} "{name}"{nearest(name, right)}; the right ones are: {listed}')
        return right[name]
    module, _, attribute = name.partition(":")
    if not CODE.fullmatch(name):
        wrong = f'the {what} "{name}" is not of the form my_file:my_variant'
        raise errors.UserError(wrong + nearest(module, right))
    found = getattr(_own(what, name, module.removesuffix(".py"), attribute), attribute)
    return _as_variant(f'the {what} "{name}"', found, like)


def _as_variant(called: str, found: Any, like: Any) -> Any:
    """Return the user's variant as the tuple that ours are. It may be any object with these attributes, or a plain
    tuple; a part with a default may be missing. UserError for anything else."""
    fields, defaults = getattr(like, "_fields", ()), getattr(like, "_field_defaults", {})
    required = [part for part in fields if part not in defaults]
    if required and not isinstance(found, type(like)):
        if all(hasattr(found, part) for part in required):
            found = type(like)(**{part: getattr(found, part) for part in fields if hasattr(found, part)})
        elif isinstance(found, tuple) and len(required) <= len(found) <= len(fields):
            found = type(like)(*found)
    if not all(hasattr(found, part) for part in required) or (callable(like) and not callable(found)):
        right = f"a tuple ({', '.join(required)}), or an object with these" if required else "a function"
        raise errors.UserError(f"{called} must be {right}, and it is not")
    return found


def _own(what: str, name: str, module: str, *parts: str) -> ModuleType:
    """Import a module of the user's that has these parts: from the working directory, installed, or from the folder of
    the config."""
    _search_working_directory()
    where = f'the {what} "{name}" cannot be imported'
    with told(where):
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # the user's module imports a missing one
                raise
            folders = [one for one in sys.path if own(f"{one}{os.sep}") and os.path.isdir(one or ".")]
            places = ", ".join(dict.fromkeys(map(os.path.abspath, folders)))
            raise errors.UserError(f"{where}: there is no {module.replace('.', os.sep)}.py in {places}") from error
    for part in parts:
        if not hasattr(loaded, part):
            raise errors.UserError(f"{where}: {getattr(loaded, '__file__', None) or module} has no {part}")
    return loaded


def _search_working_directory() -> None:
    """Import from the working directory too, as Python's own command does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def experiment(name: str) -> ModuleType:
    """Return the experiment of this name: experiments/<name>.py, or a file of the user's. UserError if there is none.

    It has config() -> {section: its fields} and prepare(settings, mesh) -> run.Work, which is trained; a study
    (ablation) has run() instead of prepare. The user's is searched for like "my_file:my_score".
    """
    if own_experiment(name):
        return _own("experiment", name, name, "config", "prepare")
    if (module := _of_project(name)) is not None:
        return module
    right = experiments()
    raise errors.UserError(
        f'unknown experiment "{name}"{nearest(name, right)}; the right ones are: {", ".join(right)}, and a file of your'
        " own next to the config"
    )


def experiments() -> list[str]:
    """Return the names of the project's experiments."""
    names = [one.name for one in pkgutil.iter_modules([str(ROOT / "experiments")])]
    return [one for one in names if _of_project(one) is not None]


def own_experiment(name: str) -> bool:
    """Return True for a module that can be found and is not an experiment of the project."""
    if _of_project(name) is not None or not all(part.isidentifier() for part in name.split(".")):
        return False
    _search_working_directory()
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _of_project(name: str) -> ModuleType | None:
    if not name.isidentifier() or not (ROOT / "experiments" / f"{name}.py").is_file():
        return None
    module = importlib.import_module(f"experiments.{name}")
    return module if hasattr(module, "prepare") or hasattr(module, "run") else None


@contextlib.contextmanager
def told(called: str, *, all_is_own: bool = True) -> Iterator[None]:
    """Context manager: turn what the user's code raises, which may be anything, into a UserError of one sentence.

    all_is_own: False for errors that came through a line of a file of the user's only; others stay as they are.
    """
    try:
        yield
    except (errors.UserError, errors.RunError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # also a SystemExit, which would end the process without a word
        if (says := fault(error)) == sentence(error) and not all_is_own:
            raise
        raise errors.UserError(f"{called}: {says}") from error


def fault(error: BaseException) -> str:
    """Return what the user's code raised, with the user's last line: "my_file.py, line 3: NameError: ..."."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if own(frame.filename)]
    return "".join(f"{f.filename}, line {f.lineno}: " for f in frames[-1:]) + sentence(error)


def sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def own(file: str) -> bool:
    """Return True for the user's code: neither installed nor part of this project."""
    return not file.startswith(_others())


@functools.cache
def _others() -> tuple[str, ...]:
    """Return the beginnings of the paths of code that is not the user's."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages = (f"{ROOT / package}{os.sep}" for package in ("tfm", "experiments", "benchmarks"))
    return ("<", *installed, *packages, str(ROOT / "launch.py"))
