"""Tokenizers of four kinds, trained on a few lines, and tiny vocabularies whose tokens are chosen by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from checkpoints import TRAINING_TEXT
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.drafters.vocabulary.tokens import Vocabulary

WORDS = sorted({word for text in TRAINING_TEXT for word in text.split()})


def byte_level(vocab_size: int = 320, end: str = "<|end|>") -> Tokenizer:
    """Byte-level BPE as of GPT-2, without a beginning-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TRAINING_TEXT,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[end],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def sentencepiece(vocab_size: int = 120) -> Tokenizer:
    """BPE with byte fallback as of Llama 2: a space before the text, and a beginning-of-text token."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        TRAINING_TEXT, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False)
    )
    learned = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *learned["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(dict.fromkeys(pieces))},
            [tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram(vocab_size: int = 120) -> Tokenizer:
    """Unigram as of T5: normalised text, a space before it, an end-of-text token behind it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def wordpiece(vocab_size: int = 120) -> Tokenizer:
    """WordPiece as of BERT: lower case, without spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "wordpiece": wordpiece,
}
END_TOKENS = {"byte-level": 0, "sentencepiece": 2, "unigram": 1, "wordpiece": 2}
LOSSLESS = ("byte-level", "sentencepiece")
"""Tokenizers that can write any text."""


@cache
def trained(kind: str) -> Tokenizer:
    return TOKENIZERS[kind]()


@cache
def vocabulary(kind: str) -> Vocabulary:
    return Vocabulary(trained(kind), END_TOKENS[kind], kind)


def tiny_vocabulary(tokens: Sequence[str]) -> Vocabulary:
    """Letters and pairs of letters. If some letters come in pairs only, the last token stands for unknown text."""
    pairs = [(token[0], token[1]) for token in tokens if len(token) == 2]
    if {letter for pair in pairs for letter in pair} <= set(tokens):
        tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    else:
        pieces = [(token, -1.0) for token in (*tokens, "<unk>")]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=len(tokens)))
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer)


def tiny_pair(target: Sequence[str], draft: Sequence[str]) -> VocabularyPair:
    return VocabularyPair.from_vocabularies(tiny_vocabulary(target), tiny_vocabulary(draft))
