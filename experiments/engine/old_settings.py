"""Settings of earlier versions: what each is called now, or what one does instead. None of them is taken silently."""

RENAMED = {
    "train.batch": "train.batch_size",
    "optim.matrix_rate": "optim.muon_lr_multiplier",
    "image.hide": "image.mask_ratio",
    "sample.length": "sample.max_new_tokens",
    "model.relation": "model.relative_position",
    "model.attention = blockwise": "model.attention = flash",
}
_TOOL = "python -m experiments.tools.{0} --{1}"
REMOVED = {
    "checkpoint": _TOOL.format("sample", "checkpoint=DIR") + " (or fill, classify, export, symmetry)",
    "prompt": _TOOL.format("sample", "prompt=TEXT"),
    "prompts": _TOOL.format("sample", "prompt=ONE --prompt=TWO"),
    "file": _TOOL.format("classify", "file=PATH"),
    "family": _TOOL.format("export", "family=gpt2"),
    "sample.stop": _TOOL.format("sample", "stop=TEXT"),
    **{f"experiment = {name}": f"python -m experiments.tools.{name}" for name in "sample fill classify export".split()},
    "experiment = symmetry": "python -m experiments.tools.symmetry",
}


def instead(name: str) -> str:
    """What is said of an old setting, or of a value of one; empty where it is none."""
    if name in RENAMED:
        return f"{name} is now {RENAMED[name]}"
    return f"{name} is no setting any more: {REMOVED[name]}" if name in REMOVED else ""


def of_line(key: str, line: str) -> str:
    """The same of an unknown key's last part, where a line of a config file sets it: config.train.batch = 3."""
    alike = [name for name in (*RENAMED, *REMOVED) if name.rpartition(".")[2] == key]
    meant = [name for name in alike if f".{name} " in line.replace("=", " ")] or alike
    return instead(meant[0]) if meant else ""
