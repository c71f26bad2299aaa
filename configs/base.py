"""The settings that all experiments share, each with its default and a comment.

An experiment adds settings of its own in its config(), as in experiments/language.py. A config file starts from
base.get_config("language") and changes some values. A changed setting that the experiment does not use is an error.
"""

import copy
from collections.abc import Iterator
from typing import Any

import ml_collections

from experiments.config import by_name, errors, settings as configs

# name -> (default, comment), or name -> a section: a dict of the same form. A default that is a function of the section
# is derived from other settings.
FIELDS: dict[str, Any] = {
    "experiment": ("", "what to train: a file of experiments/ (language, vision, ...), or my_file for your my_file.py"),
    "seed": (0, "seed of initial parameters, data order, augmentation and dropout; not of the held-out split"),
    "init_from": ("", "trained model to start from: a run, or a published folder or file; '': random parameters"),
    "init_fresh": ("", "with init_from: parts that start anew or are left out: 'head,embed/h_D', 'blocks/mlp/b*'"),
    "log": (
        ["tensorboard"],
        "outputs in addition to metrics.jsonl: tensorboard; wandb (with WANDB_MODE=offline it sends nothing); symmetry "
        "(symmetry and directionality of every layer's attention scores, and in the task induction the scores of "
        "heads; on by default in a study)",
    ),
    # The mesh of devices. The product of these numbers is the number of devices; one number may be -1: all remaining
    # devices. A CPU is one device, or is split into as many as the mesh needs, at most one for each core.
    "mesh": {
        "data": (-1, "devices that split each batch, each with a copy of the weights (data parallelism)"),
        "fsdp": (1, "devices that split each batch and the weights; each block's weights are gathered for its use"),
        "tensor": (1, "devices that split the heads, the hidden units and the vocabulary (tensor parallelism)"),
        "sequence": (1, "devices that split the tokens of each sequence (ring attention)"),
        "seed": (1, "for studies: devices that split the runs of a program, which they need not divide"),
    },
    # The transformer. Sizes are the letters of shapes (x_BND); a variant is chosen by name, your own by
    # 'my_module:my_variant'.
    "model": {
        "flax": ("", "your Flax module (nnx or linen), my_file:MyModule, that takes any of M, D, H, K, F and dropout"),
        "M": (4, "layers"),
        "D": (128, "features of a token"),
        "H": (4, "heads"),
        "G": (lambda model: model.get_ref("H") * 1, "heads of keys and values, each of H / G queries (GQA; 1: MQA)"),
        "K": (lambda model: model.get_ref("D") // model.get_ref("H"), "features of a query, key or value (D // H)"),
        "F": (lambda model: model.get_ref("D") * 4, "hidden units of the MLP; default: 4 D"),
        "score": (
            "asymmetric",
            "how tokens become queries and keys: none, tied, tied_keynorm, tied_wide, tied_signed, l2_tied, pairwise, "
            "pairwise_sym, sym_plus_skew, identity_query, nonlinear_query, symmetric_init, asymmetric, asymmetric_std, "
            "asymmetric_qknorm, constant (tfm/attention/score.py). sym_plus_skew:4 has a skew part of rank 4; the "
            "default is 2. With the suffix _noself, as in tied_noself, a token attends to itself only if it may attend "
            "to no other",
        ),
        "weights": (
            "softmax",
            "weights from logits: softmax, or my_file:my_weights, a function (logits_BHNS, allowed) -> A_BHNS, where "
            "allowed is True at keys that a query may attend to",
        ),
        "score_std": (1.0, "factor on the initial standard deviation of the matrices of queries and keys"),
        "output_std": (1.0, "factor on the initial deviation of the last matrices of attention and MLP; 0: identity"),
        "scale": ("1/sqrt(K)", "factor on the products of queries and keys: 1/sqrt(K), 1/sqrt(D), 1"),
        "cap": (0.0, "soft cap of the attention logits: a scaled logit l becomes cap tanh(l / cap), Gemma 2; 0: none"),
        "output_cap": (0.0, "soft cap of the output logits (of tokens or classes), in the same way; 0: no cap"),
        "value": ("low_rank", "what attention averages: low_rank, keys, gated, exclusive, full_rank, identity"),
        "mup": (0, "base width of maximal update parametrisation (tfm/mup.py): rates suit all D with this H; 0: none"),
        "mup_depth": (
            "",
            "with model.mup, rates for all depths: depth_mup:M_0 (residual branches scaled by 1/sqrt(M), Yang "
            "et al. 2024) or completep:M_0 (by 1/M, Dey et al. 2025), with M_0 layers in the base model; '': none",
        ),
        "embed_std": (1.0, "factor on the initial deviation of embedding, positions and class token; dyt: sqrt(D)"),
        "norm": (
            "token",
            "token, token_plain, rms, batch, batch_features, instance, layer_sequence, dyt, none (tfm/norm.py). token "
            "is layer norm, dyt dynamic tanh. rms:1e-6 sets eps, which is added inside the square root; default: 1e-5",
        ),
        "mlp": (
            "gelu",
            "relu, relu_squared, gelu, gelu_tanh, quick_gelu, silu, tanh, two_hidden_relu, two_hidden_gelu, swiglu, "
            "geglu, geglu_tanh, reglu (tfm/mlp.py)",
        ),
        "position": ("learned", "learned, sinusoidal, learned_concatenated, sinusoidal_concatenated, none (absolute)"),
        "relative_position": (
            "none",
            "none, rotary, rotary_halves, relative, buckets, alibi (tfm/attention/relative_position.py). rotary:10000 "
            "sets the base (default: 10000); the longest wavelength is 2 pi times the base. A scaling serves texts "
            "longer than in training: rotary:10000:linear:2 halves the angles; others are dynamic:factor:N, "
            "llama3:factor:low:high:N and yarn:factor:N:fast:slow:length (rotary_scaling.py)",
        ),
        "window": (0, "sliding window: a token attends only to tokens less than this many positions away; 0: to all"),
        "block": ("pre_norm", "pre_norm, post_norm, plain (pre_norm without residual connections); tfm/block.py"),
        "outer_norm": ("last", "norms after the last block or first, after positions: last, first, both, none"),
        "segments": (0, "segment types (BERT: 2), each with a learned row that is added to its tokens; 0: none"),
        "bias": ("all", "which matrix products have a bias: all, none, attention, mlp, qkv (tfm/block.py)"),
        "dropout": (0.0, "probability that an output of the embedding, attention or MLP is set to 0 in training"),
        "attention": (
            "flash",
            "explicit, explicit_bfloat16, flash (explicit has all weights in memory, and may have logits in bfloat16, "
            "docs/tpu.md; flash, linear in N, has kernels)",
        ),
        "compute_dtype": ("float32", "of products and tokens: float32, bfloat16 (softmax, norms, loss: float32)"),
        "remat": (
            "none",
            "what the backward pass computes again: none (but a loop over layers as products), products (norms, "
            "activations, weights of attention: less memory), full (blocks: least memory)",
        ),
    },
    # The optimiser and its learning rate.
    "optim": {
        "name": (
            "adamw",
            "adamw; muon (orthogonal steps for the matrices inside the blocks, AdamW for all others); or a factory, "
            "optax:lion or my_file:my_rule, of the rate and the settings of this section that are among its arguments",
        ),
        "muon_lr_multiplier": (20.0, "learning rate of the matrices inside blocks, in units of learning_rate (muon)"),
        "momentum": (0.95, "momentum of the matrices inside the blocks (muon)"),
        "learning_rate": (1e-3, "peak of the learning rate"),
        "schedule": (
            "cosine",
            "after the warm-up: constant; cosine, linear or wsd (linear in the last fifth), which end at "
            "a tenth of the peak, or at another part: linear:0. my_file:fall: (step, steps) -> fraction of the peak",
        ),
        "warmup_steps": (100, "steps of the linear warm-up; if the default reaches train.steps, a tenth of them"),
        "betas": ([0.9, 0.99], "decay of the averages of gradients and of squared gradients (AdamW)"),
        "weight_decay": (0.1, "decoupled weight decay, on matrices only"),
        "frozen": ([], 'paths of parameters that are not trained: ["embed/E_WD"]; all but the head: ["*", "!head"]'),
        "lora": (
            "",
            "train only LoRA adapters, and the parts in init_fresh: '8:score,value:16' is rank, parts (default: all "
            "blocks) and alpha (default: the rank); '': no adapters",
        ),
        "ema": (0.0, "decay per step of the average of parameters that is evaluated and saved; 0: no average"),
        "clip": (1.0, "largest global norm of the gradient, to which a larger one is scaled; 0: no clipping"),
    },
    # The training loop.
    "train": {
        "steps": (1000, "updates of the parameters"),
        "loss": (
            "cross_entropy",
            "loss of the logits of tokens or classes: cross_entropy, label_smoothing:0.1, class_weights:1,2.5,1 (one "
            "for each class), or my_file:my_loss, (logits, target, weight) -> (sum, count)",
        ),
        "metrics": (
            [],
            "further metrics of the logits of tokens or classes: top5, cross_entropy, or my_file:my_metric, a pair "
            '(measure, better): measure(logits, target, weight) -> (sum, count); better is "more" or "less"',
        ),
        "watch": (
            [],
            "numbers of a step to log: gradient_norms, update_ratios (by layer), or my_file:my_watch (engine/watch.py)",
        ),
        "batch_size": (64, "examples of a step, over all devices and microbatches"),
        "growth": ([], "changes of the batch size: [[500, 128], [800, 256]]: 128 after 500 steps, 256 after 800"),
        "accumulation": (1, "microbatches of a batch, one after the other; the gradient is the whole batch's"),
        "nan": ("abort", "after a loss or gradient that is not finite: abort (the run), or skip (the step)"),
        "deterministic": (False, "on a GPU, use operations that give the same bits in every run; can be slower"),
        "log_every": (10, "steps between lines of metrics.jsonl"),
        "evaluate_every": (0, "steps between evaluations on all held-out data; 0: only at the end"),
        "save_every": (0, "steps between checkpoints; 0: only at the end"),
        "keep_best": ("", "metric by which the best checkpoint is also kept, such as eval/loss; '': only the newest"),
        "patience": (0, "end after this number of evaluations without a better train.keep_best; 0: never"),
    },
}


def get_config(experiment: str = "", of: str | ml_collections.ConfigDict = "") -> ml_collections.ConfigDict:
    """Return the settings of an experiment with their defaults: FIELDS, and the sections of its config().

    of: for a study ("ablation"), the experiment that its runs train, or a config of that experiment. The result is
    locked: it refuses new keys and values of another type. Raises UserError if `of` does not fit the experiment, or if
    config() has a section of FIELDS.
    """
    nested = "study.experiment = ablation: runs of a study cannot be studies. Choose language, ..."
    alone = f"experiment = {experiment} has no study.experiment. Remove it, or choose ablation"
    errors.refuse((of == "ablation", nested), (of and experiment != "ablation", alone))
    if not of:
        config = configs.section(FIELDS)
    else:
        config = get_config(of) if isinstance(of, str) else copy.deepcopy(of)
    with config.unlocked():
        for name, section in configs.sections(experiment).items() if experiment else ():
            if name in config:
                raise errors.UserError(f'config() of "{experiment}": the section "{name}" exists already. Rename it')
            config[name] = section
        if of:
            config.study.experiment = config.experiment
            config.log = [*config.log, "symmetry"]
        config.experiment = experiment
    return config.lock()


def list_settings() -> Iterator[str]:
    """Yield a line for each setting with its default and comment: the settings of all runs, then of each experiment."""
    experiments = {name: by_name.load_experiment(name).config() for name in by_name.list_experiments()}
    for title, fields in {"all runs": FIELDS, **experiments}.items():
        yield f"\nSettings of {title}:"
        yield from configs.describe_fields(fields)
