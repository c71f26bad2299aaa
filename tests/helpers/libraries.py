"""Small tokenizers of the `tokenizers` library with the components that published models use."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LETTERS = ["a", "b", "A", "B", "e", "é", "É", "i", "t", "s", "1", "2", "中", "."]
BYTES = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa", "Ġab"]


def bert(lowercase: bool = True, specials: bool = True) -> Tokenizer:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*names, *LETTERS, *(f"##{letter}" for letter in LETTERS), "ab", "fi", "[", "]"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(names if specials else [])
    return tokenizer


def byte_level(*specials: str, prefix: bool = False) -> Tokenizer:
    """Return a byte-level BPE."""
    vocab = {name: i for i, name in enumerate([*BYTES, *specials])}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "a"), ("Ġ", "ab")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*specials])
    return tokenizer


def gpt2(**options: Any) -> Tokenizer:
    return byte_level("<|endoftext|>", **options)


def llama(uses_normalizer: bool = True, has_bos: bool = True) -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "ab", "▁a", "▁ab"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if uses_normalizer:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    if has_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
