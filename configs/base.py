"""Every field of a config, with its default and one comment. A config file starts from here and changes a few.

A field that an experiment does not use may not be changed from its default: that is an error, not a silence.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The defaults, locked: a new key or a value of another type is refused."""
    config = ml_collections.ConfigDict()
    config.experiment = ""  # the file of experiments/ that runs: language, vision, translation, masked_image, ...
    config.seed = 0  # of initial parameters, data order, augmentation; never of the split into train and evaluation
    config.device = "any"  # any, cpu, gpu, tpu: what must be there
    config.data_dir = ""  # folder searched for data sets after $TFM_DATA and before the cache folder
    config.init_from = ""  # a trained model to start from: a run's folder, a published model's folder or file
    config.init_fresh = ""  # parts that may be missing there and start anew, or be left behind: 'head,embed/h_D'
    config.resize_positions = False  # fit a position table of another length by interpolation instead of refusing it
    config.checkpoint = ""  # a trained model to use: a run's folder, a published model's folder or file
    config.prompt = ""  # text to go on with (sample), or with a [MASK] for each hidden word (fill)
    config.prompts = []  # several such texts at once instead (sample only)
    config.file = ""  # the image file to classify (classify only)
    config.family = ""  # in whose form a model is written: gpt2, bert, vit, llama (export only)
    config.resume = "latest"  # latest, latest_valid: the newest checkpoint, or the newest that is not damaged
    config.compilation_cache = "user"  # folder of compiled programs: user (in the user's cache), a path, '' for none
    config.mesh = mesh()
    config.model = model()
    config.text = text()
    config.pairs = pairs()
    config.image = image()
    config.synthetic = synthetic()
    config.optim = optim()
    config.train = train()
    config.sample = sample()
    config.study = study()
    config.debug = debug()
    return config.lock()


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


def text() -> ml_collections.ConfigDict:
    """The data of `language`."""
    config = ml_collections.ConfigDict()
    config.source = "stdlib"  # stdlib (Python's sources), docstrings (the English in them), tinyshakespeare, or a path
    config.train = ""  # a file or folder to train on instead of source, whose files' names or contents tell the parts
    config.valid = ""  # a file or folder to evaluate on (with train only)
    config.test = ""  # the same where there is no valid; else it is left alone (with train only)
    config.binary = False  # read files as they are, also what is no text: .gz packed, images, UTF-16, ...
    config.tokenizer = "bytes"  # bytes, characters, or the path of a trained model's: a file, or its folder
    config.N = 64  # tokens of a window, the context
    config.objective = "causal"  # causal: the next word; prefix: the same after a prefix; masked: hidden words
    config.prefix = 16  # words that are read in both directions before the first one is predicted (prefix only)
    config.mask_rate = 0.15  # share of hidden words (masked only)
    config.tied_output = False  # the output matrix is the embedding
    config.transform = False  # one more layer, with norm and bias, before the output matrix, as BERT has
    return config


def pairs() -> ml_collections.ConfigDict:
    """The data of `translation`, and how it is decoded and scored."""
    config = ml_collections.ConfigDict()
    config.source = "spa-eng"  # spa-eng (English-Spanish), or a path to tab-separated text, a folder or a zip of such
    config.train = ""  # the same to train on, or the beginning of two parallel files' names, instead of source
    config.valid = ""  # and to evaluate on (with train only)
    config.test = ""  # the same where there is no valid; else it is left alone (with train only)
    config.reverse = False  # translate from the second column into the first
    config.share = 1.0  # share of the training pairs that is used; the held-out pairs stay the same
    config.vocabulary = 4096  # subwords of both languages together, the 3 specials and the 256 bytes included
    config.N = 24  # tokens of a side, its [EOS] included; training leaves longer pairs out
    config.tied_output = True  # the output matrix is the embedding
    config.beam = 4  # translations kept by beam search; 1: none but the greedy one is made
    config.length_penalty = 0.6  # beam search divides log p by ((5 + length) / 6) to this power; 0: no penalty
    config.score_sentences = 500  # held-out source sentences translated for chrF and BLEU
    return config


def image() -> ml_collections.ConfigDict:
    """The data of `vision`."""
    config = ml_collections.ConfigDict()
    config.source = "digits"  # digits (scikit-learn), mnist, fashion_mnist, or a path to IDX files or an .npz
    config.train = ""  # in place of source, what is trained on: an .npz with x and y, or a folder of two IDX files
    config.valid = ""  # what is then evaluated
    config.test = ""  # evaluated where there is no valid, else left alone
    config.patch = 2  # pixels of a patch's side
    config.head = "pooled"  # pooled, class_token (head.py)
    config.mask_ratio = 0.75  # share of hidden patches (masked_image only)
    config.shift = 0.0  # augmentation: each training image is moved by up to so many pixels (or parts of one) each way
    return config


def synthetic() -> ml_collections.ConfigDict:
    """The data of `synthetic`, which is made. What is compiled for one task serves all of the same N, W and causal: it
    is in the compilation cache."""
    config = ml_collections.ConfigDict()
    config.task = "ring"  # ring, previous, reachability, beats, membership, nearest (engine/data/synthetic.py)
    config.N = 12  # tokens of an example
    config.W = 24  # words that a token can be, and answers to choose from
    config.causal = False  # a token attends to itself and to what came before only
    config.steps = 1  # edges that may lead from a source to a node (reachability only)
    config.held_out = 512  # examples of an evaluation, the same in every run
    return config


def optim() -> ml_collections.ConfigDict:
    """The optimiser and its learning rate."""
    config = ml_collections.ConfigDict()
    config.name = "adamw"  # adamw, or muon: orthogonal steps for the matrices inside the blocks, AdamW for the rest
    config.muon_lr_multiplier = 20.0  # learning rate of those matrices, as a multiple of the others' (muon only)
    config.momentum = 0.95  # of those matrices (muon only)
    config.ns_steps = 5  # of the iteration that makes their steps orthogonal (muon only)
    config.learning_rate = 1e-3  # the peak
    config.schedule = "cosine"  # after the warm-up: cosine, linear, constant, wsd
    config.warmup_steps = 100  # linear rise
    config.final_fraction = 0.1  # learning rate at the end, as a fraction of the peak (not for constant)
    config.decay_fraction = 0.2  # share of all steps over which wsd falls
    config.beta1 = 0.9  # decay of the mean of gradients
    config.beta2 = 0.99  # decay of the mean of their squares
    config.eps = 1e-8  # added to the root of the second moment
    config.weight_decay = 0.1  # on matrices only
    config.clip = 1.0  # largest global norm of the gradient; 0: no clipping
    config.batch_rule = "none"  # where train.growth changes the batch, the rate changes too: none, linear, sqrt
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
    config.probe = False  # log with the loss how symmetric and how directional every layer's scores are (symmetry.py)
    config.log_every = 10  # steps between lines of metrics.jsonl
    config.evaluate_every = 0  # steps between evaluations on the whole held-out part; 0: at the end only
    config.evaluate_batch = 256  # examples of an evaluation batch, over all devices
    config.save_every = 0  # steps between checkpoints; 0: at the end only
    config.save_minutes = 5.0  # minutes between checkpoints, whatever the steps; 0: none for that reason
    config.keep = 2  # newest checkpoints kept
    config.keep_best = ""  # and the best one by this metric, as eval/loss or eval/accuracy; '': none for that reason
    return config


def study() -> ml_collections.ConfigDict:
    """What `ablation` compares: arms x seeds, in each of some conditions. All other settings are common to all runs."""
    config = ml_collections.ConfigDict()
    config.experiment = ""  # whose runs these are: language, vision, synthetic, translation, masked_image
    config.arms = []  # what is compared: [["tied", {"model.score": "tied"}], ...], a name and the settings that differ;
    # never train.growth, nan, spike or keep_best, which must be as they are here: a run that goes wrong stops alone
    config.reference = ""  # the arm that the others are compared with; '': the last one
    config.conditions = []  # written like arms: comparisons beside each other, as on other data; []: a single one
    config.seeds = [0, 1, 2, 3, 4]  # the same for all arms: differences are paired by seed
    config.metric = "eval/loss"  # what is compared: eval/loss, eval/accuracy, ...; a condition may have its own
    config.threshold = 0.0  # the step at which the metric first reaches this is reported; 0: none; may differ too
    config.batched = "auto"  # seeds side by side (yes) or one after the other (no); auto: no on CPUs without mesh.seed
    config.probe = True  # log how symmetric every layer's scores are, and measure attention at the end
    return config


def sample() -> ml_collections.ConfigDict:
    """What `language` shows at the end, and how `sample` draws."""
    config = ml_collections.ConfigDict()
    config.prompt = "\n"  # what generated text begins with (causal only)
    config.max_new_tokens = 400  # tokens generated (causal only); 0, in `sample`: what the context holds, 256 at most
    config.temperature = 0.8  # 0: always the most likely (causal only)
    config.top_k = 0  # only the k most likely tokens are drawn; 0: all (causal only)
    config.top_p = 1.0  # only the most likely tokens that together reach this probability are drawn (causal only)
    config.stop = ""  # the text ends before this one, and in any case where the model ends it (sample only)
    return config


def debug() -> ml_collections.ConfigDict:
    """To look into a run that does something strange; each costs time, and none changes a number."""
    config = ml_collections.ConfigDict()
    config.check_shapes = False  # of every batch, and of the state after every step, against the letters of their names
    config.nans = False  # stop at the operation that makes the first NaN, and say where it stands
    config.no_jit = False  # compute one operation after the other instead of a compiled program
    config.transfer_guard = ""  # of data that moves between host and devices without being asked to: log, disallow
    return config
