"""Small tokenizers of the `tokenizers` library, of the kinds that published models have."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LETTERS = ["a", "b", "A", "B", "e", "é", "É", "i", "t", "s", "1", "2", "中", "."]
BYTES = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa", "Ġab"]


def bert(lowercase: bool = True, specials: bool = True) -> Tokenizer:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*names, *LETTERS, *(f"##{letter}" for letter in LETTERS), "ab", "fi", "[", "]"]
    made = Tokenizer(models.WordPiece({name: i for i, name in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(names if specials else [])
    return made


def level(*specials: str, prefix: bool = False) -> Tokenizer:
    """Byte-level BPE."""
    vocab = {name: i for i, name in enumerate([*BYTES, *specials])}
    made = Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "a"), ("Ġ", "ab")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*specials])
    return made


def gpt2(**how: Any) -> Tokenizer:
    return level("<|endoftext|>", **how)


def llama(old: bool = True, begins: bool = True) -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "ab", "▁a", "▁ab"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if old:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made
