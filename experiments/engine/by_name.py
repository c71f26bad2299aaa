"""What a config names: variants and experiments, of the project and of the user's own files."""

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
CODE = re.compile(r"[\w.]+:[^\W\d]\w*")  # a program of the user's own: my_file:my_variant
# What other projects (nanoGPT, Hugging Face, big_vision, MaxText) call a setting, and what it is here.
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
    """What a setting that another project has is called here, or one whose section was left out; [] where neither."""
    last = name.rpartition(".")[2].lower()
    return [key for key in right if last in ELSEWHERE.get(key, "").split() or key.partition(".")[2].lower() == last]


def nearest(name: str, right: Iterable[str]) -> str:
    """' (did you mean "steps"?)' where a right name is near, or this is what others call it, else ''."""
    right = list(right)
    same = [other for other in right if other.lower() == name.lower()]  # d and D are as far apart as d and M
    found = same or elsewhere(name, right) or difflib.get_close_matches(name, right, n=1, cutoff=0.5)
    return f' (did you mean "{found[0]}"?)' if found else ""


def candidates(module: Any) -> dict[str, Any]:
    """The variants of a room: its public attributes that are tuples of functions, `init` among them."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, tuple) and hasattr(value, "init")
    }


def choose(what: str, name: str, right: Mapping[str, Any]) -> Any:
    """The variant called `name`; a function, or some, may be of the user's own file: 'my_module:my_variant'."""
    like = next(iter(right.values()))
    open_to_all = callable(like) or hasattr(like, "_fields")
    if ":" not in name or not open_to_all:
        if name not in right:
            listed = ", ".join(right) + (f", or my_file:my_{what}" if open_to_all else "")
            raise errors.UserError(f'unknown {what} "{name}"{nearest(name, right)}; the right ones are: {listed}')
        return right[name]
    if not CODE.fullmatch(name):
        wrong = f'the {what} "{name}" is not of the form my_file:my_variant'
        raise errors.UserError(wrong + nearest(name.partition(":")[0], right))
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        raise errors.UserError(f'the {what} "{name}" is written without .py: {module[:-3]}:{attribute}')
    if module.startswith("."):
        raise errors.UserError(f'the {what} "{name}" cannot be imported: it begins with a dot')
    found = getattr(_own(what, name, module, attribute), attribute)
    fields, defaults = getattr(like, "_fields", ()), getattr(like, "_field_defaults", {})
    # What has a default may be left out; none is needed where a variant is one function.
    parts = [part for part in fields if part not in defaults]
    if parts and not isinstance(found, type(like)):
        if all(hasattr(found, part) for part in parts):  # any object
            found = type(like)(**{part: getattr(found, part) for part in fields if hasattr(found, part)})
        elif isinstance(found, tuple) and len(parts) <= len(found) <= len(fields):
            found = type(like)(*found)
    if not all(hasattr(found, part) for part in parts) or (callable(like) and not callable(found)):
        right = f"a tuple ({', '.join(parts)}), or an object with these" if parts else "a function"
        raise errors.UserError(f'the {what} "{name}" must be {right}, and it is not')
    return found


def _own(what: str, name: str, module: str, *parts: str) -> ModuleType:
    """A module of the user's own, which has these parts: in the working directory, installed, or beside the config."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # the working directory, as for Python's own command
    known, where = module in sys.modules, f'the {what} "{name}" cannot be imported'
    with told(where):
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # it imports something that is not there
                raise
            folders = [one for one in sys.path if own(f"{one}{os.sep}") and os.path.isdir(one or ".")]
            places = ", ".join(dict.fromkeys(map(os.path.abspath, folders)))
            raise errors.UserError(
                f"{where}: there is no {module.replace('.', os.sep)}.py in the working directory, beside the config (if"
                f" that is a .py) or elsewhere on Python's path, which are here {places}"
            ) from error
    file = getattr(loaded, "__file__", None)
    alike = [pathlib.Path(folder, *module.split(".")).with_suffix(".py") for folder in sys.path if file and not known]
    for other in [other for other in alike if other.is_file() and not other.samefile(file)][:1]:
        print(f'{what} "{name}" is from {file}, not from {other.absolute()}', flush=True)
    for part in parts:
        if not hasattr(loaded, part):
            raise errors.UserError(f"{where}: {file or module} has no {part}")
    return loaded


def experiment(name: str) -> ModuleType:
    """The experiment of this name: experiments/<name>.py, or a file of the user's own. UserError where it is none.

    It has config() -> {section: its fields} and prepare(settings, devices) -> run.Work, which is trained; or instead
    of that does all by itself, as ablation.run. One's own is looked for as 'my_file:my_score' is.
    """
    if own_experiment(name):
        return _own("experiment", name, name, "config", "prepare")
    if (module := _of_project(name)) is not None:
        return module
    names = [one.name for one in pkgutil.iter_modules([str(ROOT / "experiments")])]
    right = [one for one in names if _of_project(one) is not None]
    raise errors.UserError(
        f'unknown experiment "{name}"{nearest(name, right)}; the right ones are: {", ".join(right)}, and a file of your'
        " own beside the config"
    )


def own_experiment(name: str) -> bool:
    """Whether it is none of the project's, but a module that can be found."""
    if _of_project(name) is not None or not all(part.isidentifier() for part in name.split(".")):
        return False
    if "" not in sys.path:
        sys.path.insert(0, "")
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
    """Within this, what code of one's own raises, which may be anything, is told in a sentence.

    all_is_own: or else only what came through a line of a file of the user's own; all other errors stay as they are.
    """
    try:
        yield
    except (errors.UserError, errors.RunError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # also a SystemExit, with which the process would end in silence
        if (says := fault(error)) == sentence(error) and not all_is_own:
            raise
        raise errors.UserError(f"{called}: {says}") from error


def fault(error: BaseException) -> str:
    """What somebody's own code raised, with the last line that is theirs: 'my_file.py, line 3: NameError: ...'."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if own(frame.filename)]
    return "".join(f"{f.filename}, line {f.lineno}: " for f in frames[-1:]) + sentence(error)


def sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def own(file: str) -> bool:
    """Whether a file of code is the user's own: neither installed nor part of this project."""
    return not file.startswith(_others())


@functools.cache
def _others() -> tuple[str, ...]:
    """How the paths of code begin that is not the user's own."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    rooms = (f"{ROOT / room}{os.sep}" for room in ("tfm", "experiments", "benchmarks"))
    return ("<", *installed, *rooms, str(ROOT / "launch.py"))
