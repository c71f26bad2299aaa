"""Small random models in the file formats of published families, and small folders of runs.

The names and shapes are from the state dicts of the transformers library. `*` stands for the number of a layer, and
`name+` for name.weight and name.bias, a number for each row.
"""

import contextlib
import io
import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest
import tiny

from experiments.config import by_name
from experiments.engine import run as runs
from experiments.folder import checkpoint
from experiments.pretrained import safetensors

M, D, H, K, F, W, N = 2, 21, 3, 7, 19, 23, 13
LLAMA_D, LLAMA_H, LLAMA_G, LLAMA_K = 18, 6, 2, 4
_D, _Q, _G = LLAMA_D, LLAMA_H * LLAMA_K, LLAMA_G * LLAMA_K
GPT2 = f"""wte.weight {W} {D}|wpe.weight {N} {D}|ln_f+ {D}|h.*.ln_1+ {D}|h.*.ln_2+ {D}
h.*.attn.c_attn.weight {D} {3 * D}|h.*.attn.c_attn.bias {3 * D}|h.*.attn.c_proj+ {D} {D}
h.*.mlp.c_fc.weight {D} {F}|h.*.mlp.c_fc.bias {F}|h.*.mlp.c_proj.weight {F} {D}|h.*.mlp.c_proj.bias {D}"""
_BERT = f"""attention.self.query+ {D} {D}|attention.self.key+ {D} {D}|attention.self.value+ {D} {D}
attention.output.dense+ {D} {D}|attention.output.LayerNorm+ {D}|intermediate.dense+ {F} {D}|output.dense+ {D} {F}
output.LayerNorm+ {D}"""
BERT = f"""embeddings.word_embeddings.weight {W} {D}|embeddings.position_embeddings.weight {N} {D}
embeddings.token_type_embeddings.weight 2 {D}|embeddings.LayerNorm+ {D}|pooler.dense+ {D} {D}
""" + "\n".join(f"encoder.layer.*.{line}" for line in _BERT.replace("|", "\n").splitlines())
BERT_HEADS = f"""cls.predictions.bias {W}|cls.predictions.transform.dense+ {D} {D}
cls.predictions.transform.LayerNorm+ {D}|cls.seq_relationship+ 2 {D}"""
_VIT = f"""attention.attention.query+ {D} {D}|attention.attention.key+ {D} {D}|attention.attention.value+ {D} {D}
attention.output.dense+ {D} {D}|intermediate.dense+ {F} {D}|output.dense+ {D} {F}|layernorm_before+ {D}
layernorm_after+ {D}"""
VIT = f"""embeddings.cls_token 1 1 {D}|embeddings.position_embeddings 1 7 {D}
embeddings.patch_embeddings.projection+ {D} 2 5 5|layernorm+ {D}
""" + "\n".join(f"encoder.layer.*.{line}" for line in _VIT.replace("|", "\n").splitlines())
LLAMA = f"""embed_tokens.weight {W} {_D}|norm.weight {_D}
layers.*.self_attn.q_proj.weight {_Q} {_D}|layers.*.self_attn.k_proj.weight {_G} {_D}
layers.*.self_attn.v_proj.weight {_G} {_D}|layers.*.self_attn.o_proj.weight {_D} {_Q}
layers.*.mlp.gate_proj.weight {F} {_D}|layers.*.mlp.up_proj.weight {F} {_D}|layers.*.mlp.down_proj.weight {_D} {F}
layers.*.input_layernorm.weight {_D}|layers.*.post_attention_layernorm.weight {_D}"""

CONFIGS = {
    "gpt2": dict(n_layer=M, n_embd=D, n_head=H, n_inner=F, vocab_size=W, n_positions=N),
    "bert": dict(num_hidden_layers=M, hidden_size=D, num_attention_heads=H, intermediate_size=F, vocab_size=W)
    | dict(max_position_embeddings=N),
    "vit": dict(num_hidden_layers=M, hidden_size=D, num_attention_heads=H, intermediate_size=F)
    | dict(image_size=[15, 10], patch_size=5, num_channels=2, id2label={"0": "cat", "1": "dog", "2": "owl"}),
    "llama": dict(num_hidden_layers=M, hidden_size=_D, num_attention_heads=LLAMA_H, intermediate_size=F, vocab_size=W)
    | dict(num_key_value_heads=LLAMA_G, head_dim=LLAMA_K, max_position_embeddings=N, rope_theta=500000.0),
}
PREFIXES = {"gpt2": "transformer.", "bert": "bert.", "vit": "vit.", "llama": "model."}
BODIES = {"gpt2": GPT2, "bert": BERT, "vit": VIT, "llama": LLAMA}
HEADS = {"gpt2": "", "bert": BERT_HEADS, "vit": f"classifier+ 3 {D}"}
HEADS |= {"llama": f"lm_head.weight {W} {_D}"}


def tensors(family: str, *, prefix: str | None = None, layers: int = M) -> dict[str, np.ndarray]:
    """Return random tensors with the names and shapes that files of `family` have."""
    rng, arrays = np.random.default_rng(7), {}
    prefix = PREFIXES[family] if prefix is None else prefix
    for beginning, text in ((prefix, BODIES[family]), ("", HEADS[family])):
        for entry in filter(None, text.replace("|", "\n").splitlines()):
            name, *shape = entry.split()
            both = {name: shape} if name[-1] != "+" else {f"{name[:-1]}.weight": shape, f"{name[:-1]}.bias": shape[:1]}
            for m, (key, sizes) in itertools.product(range(layers if "*" in name else 1), both.items()):
                array = rng.standard_normal([*map(int, sizes)])
                arrays[beginning + key.replace("*", str(m))] = array.astype(np.float32)
    return arrays


def save(folder, family: str, arrays: dict[str, np.ndarray] | None = None, **fields):
    """Write a model of `family`, with these changes to config.json. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = tensors(family) if arrays is None else arrays
    safetensors.write(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps({"model_type": family} | CONFIGS[family] | fields))
    return folder


def save_bert_with_tokenizer(folder: pathlib.Path):
    """Write a BERT for masked tokens, with a tokenizer of the words word0, word1, ... Return the tokenizer."""
    library = pytest.importorskip("tokenizers", reason="tokenizer.json needs the extra [text]")
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: i for i, word in enumerate([*specials, *(f"word{i}" for i in range(W - 5))])}
    bert = library.Tokenizer(library.models.WordLevel(vocab, unk_token="[UNK]"))
    bert.pre_tokenizer = library.pre_tokenizers.Whitespace()
    bert.add_special_tokens(specials)
    bert.post_processor = library.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    save(folder, "bert")
    bert.save(str(folder / "tokenizer.json"))  # not a WordPiece, which BERT's class would load
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return bert


def save_bert_classifier(folder: pathlib.Path, *, of_tokens: bool = False, **fields) -> pathlib.Path:
    """Write a BERT that classifies texts or tokens, with a tokenizer as `save_bert_with_tokenizer` does."""
    save_bert_with_tokenizer(folder)
    rng = np.random.default_rng(0)
    head = {"classifier.weight": rng.standard_normal((3, D)), "classifier.bias": rng.standard_normal(3)}
    body = {name: x for name, x in tensors("bert").items() if not name.startswith("cls.")}
    body = {name: x for name, x in body.items() if not of_tokens or "pooler" not in name}
    labels = {"id2label": {"0": "noun", "1": "verb", "2": "other"}}
    return save(folder, "bert", body | {name: x.astype(np.float32) for name, x in head.items()}, **labels | fields)


def save_checkpoint(folder: pathlib.Path, step: int, params) -> None:
    """Save a checkpoint of these parameters in the folder of a run."""
    saves = checkpoint.Checkpoints(folder / "checkpoints", keep=2)
    saves.save(step, {"params": params})
    saves.close()


def write_run(folder: pathlib.Path, experiment: str, params=None, **changes) -> pathlib.Path:
    """Write the files of a finished run: `params`, or else normal numbers as parameters. Return the folder."""
    settings = tiny.settings(experiment, **changes)
    with contextlib.redirect_stdout(io.StringIO()):
        work = by_name.load_experiment(experiment).prepare(settings, runs.make_mesh(settings))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints").mkdir()
    save_checkpoint(folder, 2, tiny.draw_params(work.task) if params is None else params)
    (folder / "config.json").write_text(json.dumps({"config": settings.to_dict()}))
    for name, content in work.files.items():
        (folder / name).write_bytes(content)
    return folder


def copy_with_changes(folder: pathlib.Path, copy: pathlib.Path, **values) -> pathlib.Path:
    """Copy a run, set these values in its config.json (keys may have __ for dots), and return the copy."""
    shutil.copytree(folder, copy)
    saved = json.loads((copy / "config.json").read_text())
    for key, value in values.items():
        section, _, name = key.rpartition("__")
        (saved["config"][section] if section else saved["config"])[name] = value
    (copy / "config.json").write_text(json.dumps(saved))
    return copy
