"""Small tokenizers of the families that open-weights models use, as directories that transformers can load too."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.tokenizers.load import load_directory
from weft.tokenizers.tokenizer import Tokenizer

CORPUS = [
    "The weft is the thread that is woven across many warps to make one cloth.",
    "def main(args):\n    return {key: value for key, value in args.items()}\n",
    "Größe, naïve café, 日本語のテキスト, Ελληνικά, русский текст, 😀👍🏽 emoji, \u200b zero width",
    "1 22 333 4444, (brackets) [and] <tags> & \"quotes\" 'too'\t\ttabs   spaces",
] * 4

BOS, EOS, START, END = "<|begin|>", "<|eot|>", "<|start|>", "<|stop|>"


def byte_level_backend(*, template_bos: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS, START, END],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # An added token that is not special, with a character that is not in the byte alphabet.
    backend.add_tokens([tokenizers.AddedToken("<think now>", special=False, normalized=False)])
    if template_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(CORPUS)) - set(" 😀👍🏽日"))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "s"), ("▁", "is"), ("a", "n"), ("▁", "w")]
    vocab = list(dict.fromkeys([*pieces, "▁", *letters, *(a + b for a, b in merges)]))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(vocab)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def special_tokens_map(folder: Path) -> Path:
    """The older layout."""
    tokens = {"bos_token": BOS, "eos_token": {"content": EOS, "lstrip": False, "rstrip": False, "normalized": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens | {"additional_special_tokens": ["<|more|>"]}))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by what is special about them."""
    root = tmp_path_factory.mktemp("tokenizers")
    plain, with_bos = byte_level_backend(), byte_level_backend(template_bos=True)
    named = {"bos_token": BOS, "eos_token": EOS}
    return {
        "plain": save(root / "plain", plain, **named),
        "bos from post-processor": save(root / "post", with_bos, **named),
        "bos from config": save(root / "config", plain, **named, add_bos_token=True),
        "config forbids bos": save(root / "forbids", with_bos, **named, add_bos_token=False),
        "bos and eos from config": save(root / "both", plain, **named, add_bos_token=True, add_eos_token=True),
        "tokens only in config": save(
            root / "added",
            plain,
            **named,
            pad_token="<|pad|>",
            tool_token="<|tool|>",
            extra_special_tokens=["<|extra|>"],
            added_tokens_decoder={
                str(plain.get_vocab_size() + i): {
                    "content": text,
                    "special": special,
                    "lstrip": False,
                    "rstrip": special,
                    "single_word": False,
                    "normalized": False,
                }
                for i, (text, special) in enumerate([("<listed>", False), ("<|pad|>", True)])
            },
        ),
        "special tokens map": special_tokens_map(save(root / "map", plain, bos_token=EOS)),
        "sentencepiece": save(root / "sp", sentencepiece_backend(), bos_token="<s>", eos_token="</s>"),
    }


@pytest.fixture(scope="session")
def byte_level(folders: dict[str, Path]) -> Tokenizer:
    return load_directory(folders["plain"])


@pytest.fixture(scope="session")
def sentencepiece(folders: dict[str, Path]) -> Tokenizer:
    return load_directory(folders["sentencepiece"])
