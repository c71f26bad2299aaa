"""The fields that every experiment has: name, default and comment; those of one experiment stand in its config(), as
in experiments/language.py. A config file starts from here, base.get_config("language"), and changes a few.

A field that an experiment does not use may not be changed from its default: that is an error, not a silence.
"""

import copy
from collections.abc import Iterator
from typing import Any

import ml_collections

from experiments.engine import by_name, config as settings, errors

FIELDS: dict[str, Any] = {  # name -> (default, comment), or a section of such; a function gives a derived default
    "experiment": ("", "the file of experiments/ that runs (language, vision, ...), or a file of your own"),
    "seed": (0, "of initial parameters, data order, augmentation; never of the split into train and evaluation"),
    "init_from": ("", "a trained model to start from: a run's folder, a published model's folder or file"),
    "init_fresh": ("", "parts to initialise at random, or to leave out if the config has none: 'head,embed/h_D'"),
    "log": (
        ["tensorboard"],
        "in addition to metrics.jsonl: tensorboard, wandb (Weights & Biases; WANDB_MODE=offline sends nothing), "
        "symmetry (how symmetric and how directional every layer's scores are, with the loss; a study does)",
    ),
    # How devices are arranged: their number is the product of all. One may be -1: all remaining devices.
    # A CPU is one device, or as many as are requested here, up to one for each core.
    "mesh": {
        "data": (-1, "devices that share each batch and hold all weights"),
        "fsdp": (1, "devices that share each batch and the weights, which are gathered one block at a time"),
        "tensor": (1, "devices that share the heads, the hidden units and the vocabulary"),
        "sequence": (1, "devices that share the tokens of each sequence (ring attention)"),
        "seed": (1, "devices that share the seeds of a study (ablation only), also of fewer or other seeds: 8 for 5"),
    },
    # The transformer: sizes by their letters, variants by their names (or 'my_module:my_variant').
    "model": {
        "M": (4, "layers"),
        "share": (1, "so many layers, one after the other, have the same parameters; M: all of them, as in ALBERT"),
        "D": (128, "features of a token"),
        "E": (0, "features of a word's row in the embedding, of which a matrix then makes D, as in ALBERT; 0: D"),
        "H": (4, "heads"),
        "G": (lambda model: model.get_ref("H") * 1, "heads of keys and values, each for H/G heads (GQA; 1: MQA); or H"),
        "K": (
            lambda model: model.get_ref("D") // model.get_ref("H"),
            "query, key and value features of a head; or D // H",
        ),
        "F": (lambda model: model.get_ref("D") * 4, "hidden units of the MLP; or 4 D"),
        "score": (
            "asymmetric",
            "none, tied, tied_keynorm, tied_wide, tied_signed, l2_tied, pairwise, pairwise_sym, identity_query, "
            "nonlinear_query, symmetric_init, asymmetric, asymmetric_std, asymmetric_qknorm, constant "
            "(score.py; tied_noself, and so all: a token attends to itself only if nothing else is allowed)",
        ),
        "score_std": (1.0, "factor on the initial scale of the matrices that make queries and keys"),
        "output_std": (1.0, "the same for the last matrix of attention and MLP; 0: a block begins as the identity"),
        "scale": ("1/sqrt(K)", "of the logits: 1/sqrt(K), 1/sqrt(D), 1"),
        "cap": (0.0, "scaled logits l become cap tanh(l / cap), as in Gemma 2; 0: they stay l"),
        "output_cap": (0.0, "the same for the logits of words and classes, the output of the head"),
        "value": ("low_rank", "low_rank, keys, gated, exclusive, full_rank, identity (value.py)"),
        "norm": (
            "token",
            "token, token_plain, rms, batch, batch_features, instance, layer_sequence, none (norm.py; rms:1e-6: eps, "
            "what is added inside the root; else 1e-5)",
        ),
        "mlp": (
            "gelu",
            "relu, relu_squared, gelu, gelu_tanh, quick_gelu, silu, tanh, two_hidden_relu, two_hidden_gelu, swiglu, "
            "geglu, geglu_tanh, reglu (mlp.py)",
        ),
        "position": ("learned", "learned, sinusoidal, learned_concatenated, sinusoidal_concatenated, none (position)"),
        "relative_position": (
            "none",
            "none, rotary, rotary_halves, relative, buckets, alibi (rotary:10000, or rotary: the longest wavelength is "
            "2 pi times this base; for longer texts rotary:10000:linear:2, of half the angles, or another scaling "
            "there: dynamic:factor:N, llama3:factor:low:high:N, yarn:factor:N:fast:slow:length)",
        ),
        "window": (0, "attention only to tokens nearer than this; 0: to all"),
        "block": ("pre_norm", "pre_norm, post_norm, plain (without residual connections; block.py)"),
        "outer_norm": ("last", "last, first, both, none (before the head; after the positions; at both ends)"),
        "segments": (0, "kinds of segments that words can belong to, with a learned row each; 0: no such rows"),
        "bias": ("all", "all, none, attention, mlp, qkv (which products add one: block.py)"),
        "dropout": (0.0, "share of each stage's output, and of the embedding's, set to 0 in training"),
        "attention": ("flash", "explicit, flash (memory linear in N, by the kernels of a TPU or a GPU)"),
        "compute_dtype": (
            "float32",
            "float32, bfloat16 (of products and tokens; softmax, norms and loss stay float32)",
        ),
        "remat": ("none", "none, products, full (what the backward pass computes again: transformer.py)"),
    },
    # The optimiser and its learning rate.
    "optim": {
        "name": (
            "adamw",
            "adamw; muon: orthogonal steps for the matrices inside the blocks, AdamW for the rest; normuon: the same "
            "with rows alike (by betas[1]); hyperball: the same, and matrices keep their norms; or a factory, as "
            "optax:lion or my_file:my_rule, which gets those of the settings here that it has arguments for",
        ),
        "muon_lr_multiplier": (
            20.0,
            "learning rate of those matrices, as a multiple of the others' (muon and its kin)",
        ),
        "momentum": (0.95, "of those matrices (muon and its kin)"),
        "learning_rate": (1e-3, "the peak"),
        "schedule": (
            "cosine",
            "after the warm-up: cosine, linear or wsd, which end at a tenth of the peak (linear:0 at 0, and so the "
            "others); constant; or my_file:fall, (step, steps) -> the fraction of the peak",
        ),
        "warmup_steps": (100, "linear rise; of a run of no more steps a tenth of them, unless it is set to another"),
        "betas": ([0.9, 0.99], "decay of the mean of gradients, and of the mean of their squares"),
        "weight_decay": (0.1, "on matrices only"),
        "frozen": ([], 'parameters that stay as they begin: ["embed/E_WD"], ["*", "!head"] (all but the head)'),
        "lora": (
            "",
            "adapters alone are trained, '8:score,value:16': rank, where (''), alpha ('': the rank); '': none",
        ),
        "ema": (
            0.0,
            "evaluation and checkpoints have the exponential moving average of the parameters, with this decay a step; "
            "0: the parameters themselves",
        ),
        "clip": (1.0, "largest global norm of the gradient; 0: no clipping"),
    },
    # The loop.
    "train": {
        "steps": (1000, "updates of the parameters"),
        "loss": ("cross_entropy", "of words and classes, or my_file:my_loss, (logits, target, weight) -> (sum, count)"),
        "batch_size": (64, "examples of a step, over all devices and accumulated parts"),
        "growth": ([], "larger batches later: [[500, 128], [800, 256]], 128 from 500 steps on, 256 from 800 on"),
        "accumulation": (
            1,
            "parts a batch is computed in, one after the other; the gradient is the one of the whole batch",
        ),
        "nan": (
            "abort",
            "if loss or gradient are not finite: abort, skip (the step), skip_spikes (also skip steps whose loss or "
            "gradient norm lies more than six standard deviations above those of the last 128)",
        ),
        "log_every": (10, "steps between lines of metrics.jsonl"),
        "evaluate_every": (0, "steps between evaluations on the whole held-out part; 0: at the end only"),
        "save_every": (0, "steps between checkpoints; 0: at the end only"),
        "keep_best": ("", "also keep the best checkpoint by this metric, as eval/loss or eval/accuracy; '': do not"),
    },
}


def get_config(experiment: str = "", of: str | ml_collections.ConfigDict = "") -> ml_collections.ConfigDict:
    """Return the fields that every experiment has, with their defaults, and the sections that this one adds: its
    config(). It is locked: a new key or a value of another type is refused.

    of: for a study ("ablation"), the experiment that its runs are of, or a config of one.
    """
    if of == "ablation":
        raise errors.UserError("study.experiment is what the runs of a study are, as language or vision")
    if of and experiment != "ablation":
        raise errors.UserError(f'study.experiment is for the experiment "ablation", and this is "{experiment}"')
    if not of:
        config = settings.section(FIELDS)
    else:
        config = get_config(of) if isinstance(of, str) else copy.deepcopy(of)
    with config.unlocked():
        for name, section in settings.sections(experiment).items() if experiment else ():
            if name in config:
                raise errors.UserError(f'the experiment "{experiment}" has a section "{name}", which is there already')
            config[name] = section
        if of:
            config.study.experiment = config.experiment
            config.log = [*config.log, "symmetry"]
        config.experiment = experiment
    return config.lock()


def list_settings() -> Iterator[str]:
    """Yield all settings with their defaults and comments: those of all runs, then those of each experiment."""
    for title, fields in {
        "all runs": FIELDS,
        **{name: by_name.load_experiment(name).config() for name in by_name.list_experiments()},
    }.items():
        yield f"\nof {title}"
        yield from settings.describe_fields(fields)
