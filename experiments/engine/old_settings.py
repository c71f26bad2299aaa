"""Settings of earlier versions: what each is called now, or what one does instead. None of them is taken silently."""

RENAMED = {
    "study.probe": "train.probe",
    "train.batch": "train.batch_size",
    "optim.matrix_rate": "optim.muon_lr_multiplier",
    "image.hide": "image.mask_ratio",
    "sample.length": "sample.max_new_tokens",
    "model.relation": "model.relative_position",
    "model.attention = blockwise": "model.attention = flash",
}
_DEBUG = {"nans": "JAX_DEBUG_NANS=true", "no_jit": "JAX_DISABLE_JIT=true", "transfer_guard": "JAX_TRANSFER_GUARD=log"}
_TOOL = "python -m experiments.tools."
REMOVED = {
    "checkpoint": f"{_TOOL}sample --checkpoint=DIR (or fill, classify, export, symmetry)",
    "prompt": f"{_TOOL}sample --prompt=TEXT",
    "prompts": f"{_TOOL}sample --prompt=ONE --prompt=TWO",
    "file": f"{_TOOL}classify --file=PATH",
    "family": f"{_TOOL}export --family=gpt2",
    **{f"experiment = {name}": f"{_TOOL}{name}" for name in ("sample", "fill", "classify", "export", "symmetry")},
    **{f"sample.{name}": f"{_TOOL}sample --{name}=..." for name in ("stop", "temperature", "top_k", "top_p")},
    "resize_positions": "positions of another number are resized",
    "synthetic.W": "there are 2 N words",
    "data_dir": "set TFM_DATA to the folder",
    "compilation_cache": "set JAX_COMPILATION_CACHE_DIR to the folder, or JAX_ENABLE_COMPILATION_CACHE=false",
    **{f"debug.{name}": f"set {flag}" for name, flag in _DEBUG.items()},
    "debug.check_shapes": "shapes are checked in every run",
    "optim.eps": "it is 1e-8",
    "optim.rounds": "five steps of Newton-Schulz are made",
    "optim.batch_rule": "the rate stays as it is where train.growth makes batches larger",
    "optim.decay_fraction": "wsd falls over the last fifth of all steps",
    "train.keep": "the two newest checkpoints are kept, and the best one with train.keep_best",
    "train.save_minutes": "a checkpoint is saved every five minutes, and every train.save_every steps",
    "study.reference": "arms are compared with the last one",
    "study.batched": "seeds are side by side with mesh.seed, or on a GPU or TPU",
    "text.mask_rate": "15 % of the words are hidden",
    "text.prefix": "the first half of text.N is the prefix",
    "pairs.beam": "four translations are kept",
    "pairs.reverse": "exchange the columns of the file that pairs.source names",
    "synthetic.steps": "one edge leads from a source to a node",
    "text.binary": "convert what is no text in UTF-8 into .txt files",
    "pairs.length_penalty": "it is 0.6",
    "pairs.tied_output": "the output matrix is the embedding",
    "synthetic.held_out": "512 examples are held out",
}
for _section in ("text", "pairs", "image"):
    for _part in ("train", "valid", "test"):
        REMOVED[f"{_section}.{_part}"] = f"{_section}.source = a folder with files named train and valid (or test)"


def instead(name: str) -> str:
    """What is said of an old setting, or of a value of one; empty where it is none."""
    if name in RENAMED:
        return f"{name} is now {RENAMED[name]}"
    return f"{name} is no setting any more: {REMOVED[name]}" if name in REMOVED else ""


def of_line(line: str) -> str:
    """The same of what a line of a config file sets: config.train.batch = 3."""
    left = line.partition("=")[0].strip().partition(".")[2]
    return instead(left)
