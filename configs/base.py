"""The fields that every experiment has, with their defaults and one comment each; those of its own stand beside it, as
in experiments/language.py. A config file starts from here, base.get_config("language"), and changes a few.

A field that an experiment does not use may not be changed from its default: that is an error, not a silence.
"""

import copy

import ml_collections

from experiments.engine import config as settings
from experiments.engine import errors


def get_config(experiment: str = "", of: str | ml_collections.ConfigDict = "") -> ml_collections.ConfigDict:
    """The fields that every experiment has, with their defaults, and the sections that this one adds: its config().

    of: for a study ("ablation"), the experiment that its runs are of, or a config of one. The result is locked: a new
    key or a value of another type is refused.
    """
    if of == "ablation":
        raise errors.UserError("study.experiment is what the runs of a study are, as language or vision")
    if of and experiment != "ablation":
        raise errors.UserError(f'study.experiment is for the experiment "ablation", and this is "{experiment}"')
    if not of:
        config = common()
    else:
        config = get_config(of) if isinstance(of, str) else copy.deepcopy(of)
    with config.unlocked():
        for name, section in settings.sections(experiment).items() if experiment else ():
            if name in config:
                raise errors.UserError(f'the experiment "{experiment}" has a section "{name}", which is there already')
            config[name] = section
        if of:
            config.study.experiment = config.experiment
            config.train.probe = True
        config.experiment = experiment
    return config.lock()


def common() -> ml_collections.ConfigDict:
    """What every experiment has."""
    config = ml_collections.ConfigDict()
    config.experiment = ""  # the file of experiments/ that runs (language, vision, ...), or a file of your own
    config.seed = 0  # of initial parameters, data order, augmentation; never of the split into train and evaluation
    config.device = "any"  # any, cpu, gpu, tpu: what must be there
    config.init_from = ""  # a trained model to start from: a run's folder, a published model's folder or file
    config.init_fresh = ""  # parts that may be missing there and start anew, or be left behind: 'head,embed/h_D'
    config.resume = "latest"  # latest, latest_valid: the newest checkpoint, or the newest that is not damaged
    config.mesh = mesh()
    config.model = model()
    config.optim = optim()
    config.train = train()
    return config


def mesh() -> ml_collections.ConfigDict:
    """How devices are arranged: their number is the product of all. One may be -1: all that is left.

    A CPU is one device, or as many as are asked for here, up to one for each core.
    """
    config = ml_collections.ConfigDict()
    config.data = -1  # devices that share each batch and hold all weights
    config.fsdp = 1  # devices that share each batch and the weights, which are gathered one block at a time
    config.tensor = 1  # devices that share the heads, the hidden units and the vocabulary
    config.sequence = 1  # devices that share the tokens of each sequence (ring attention)
    config.seed = 1  # devices that share the seeds of a study (ablation only)
    return config


def model() -> ml_collections.ConfigDict:
    """The transformer: sizes by their letters, variants by their names (or 'my_module:my_variant')."""
    config = ml_collections.ConfigDict()
    config.M = 4  # layers
    config.D = 128  # features of a token
    config.H = 4  # heads
    config.K = config.get_ref("D") // config.get_ref("H")  # query, key and value features of a head
    config.F = config.get_ref("D") * 4  # hidden units of the MLP
    config.score = "asymmetric"  # none, tied, tied_noself, tied_keynorm, tied_wide, tied_signed, l2_tied, pairwise,
    # pairwise_sym, identity_query, symmetric_init, asymmetric, asymmetric_std, constant (score.py)
    config.score_std = 1.0  # factor on the initial scale of the matrices that make queries and keys
    config.output_std = 1.0  # the same for the last matrix of attention and MLP; 0: a block begins as the identity
    config.diagonal = "keep"  # keep, exclude: a token attends to itself only where nothing else is allowed
    config.scale = "1/sqrt(K)"  # of the logits: 1/sqrt(K), 1/sqrt(D), 1
    config.value = "low_rank"  # low_rank, full_rank, identity (value.py)
    config.norm = "token"  # token, token_plain, rms, batch, instance (norm.py)
    config.eps = 1e-5  # inside the root of the norm
    config.mlp = "gelu"  # relu, gelu, gelu_tanh, two_hidden_relu, two_hidden_gelu, swiglu (mlp.py)
    config.position = "learned"  # learned, sinusoidal, learned_concatenated, sinusoidal_concatenated, none (position)
    config.relative_position = "none"  # none, rotary, rotary_halves, relative, buckets, alibi
    config.rotary_base = 10000.0  # the longest wavelength of rotary positions is 2 pi times this
    config.window = 0  # attention only to tokens nearer than this; 0: to all
    config.block = "pre_norm"  # pre_norm, post_norm (block.py)
    config.final_norm = True  # a norm between the last block and the head
    config.embed_norm = False  # a norm between the positions and the first block
    config.segments = 0  # kinds of segments that words can belong to, with a learned row each; 0: no such rows
    config.bias = True  # on queries, keys, values, outputs and the MLP
    config.dropout = 0.0  # share of each stage's output, and of the embedding's, set to 0 in training
    config.attention = "explicit"  # explicit, flash, fused (attention.py; flash: memory linear in N)
    config.compute_dtype = "float32"  # float32, bfloat16 (of products and tokens; softmax, norms and loss stay float32)
    config.remat = False  # compute a block's intermediates again in the backward pass instead of keeping them
    config.unroll = 0  # layers written out; 1: a loop; 0: all, but 1 with remat or fsdp, and on TPU for more than 4
    return config


def optim() -> ml_collections.ConfigDict:
    """The optimiser and its learning rate."""
    config = ml_collections.ConfigDict()
    config.name = "adamw"  # adamw, or muon: orthogonal steps for the matrices inside the blocks, AdamW for the rest
    config.muon_lr_multiplier = 20.0  # learning rate of those matrices, as a multiple of the others' (muon only)
    config.momentum = 0.95  # of those matrices (muon only)
    config.learning_rate = 1e-3  # the peak
    config.schedule = "cosine"  # after the warm-up: cosine, linear, constant, wsd
    config.warmup_steps = 100  # linear rise
    config.final_fraction = 0.1  # learning rate at the end, as a fraction of the peak (not for constant)
    config.beta1 = 0.9  # decay of the mean of gradients
    config.beta2 = 0.99  # decay of the mean of their squares
    config.weight_decay = 0.1  # on matrices only
    config.clip = 1.0  # largest global norm of the gradient; 0: no clipping
    return config


def train() -> ml_collections.ConfigDict:
    """The loop."""
    config = ml_collections.ConfigDict()
    config.steps = 1000
    config.batch_size = 64  # examples of a step, over all devices and accumulated parts
    config.growth = []  # larger batches later: [[500, 128], [800, 256]], 128 from 500 steps on, 256 from 800 on
    config.accumulation = 1  # parts a batch is computed in, one after the other; the gradient is that of the whole
    config.nan = "abort"  # where loss, gradient or new parameters are not finite: abort, or skip the step
    config.spike = 0.0  # a step whose loss or gradient norm jumps by more standard deviations is skipped (6); 0: none
    config.probe = False  # log with the loss how symmetric and how directional every layer's scores are; a study does
    config.log_every = 10  # steps between lines of metrics.jsonl
    config.evaluate_every = 0  # steps between evaluations on the whole held-out part; 0: at the end only
    config.evaluate_batch = 256  # examples of an evaluation batch, over all devices
    config.save_every = 0  # steps between checkpoints; 0: at the end only
    config.keep_best = ""  # and the best one by this metric, as eval/loss or eval/accuracy; '': none for that reason
    return config
