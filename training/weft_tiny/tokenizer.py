"""Training the byte-level BPE tokenizer and writing its files.

Digits are single tokens. A space is a token of its own except before a short list of function words, so a name or
a key has the same tokens after a space, a quote or a bracket: copying it from a text into JSON is then literal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.weft_tiny.data import WEIGHTS, stream
from training.weft_tiny.render import TEMPLATE, render

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (END_OF_TEXT, IM_START, IM_END)
VISIBLE = ("<tool_call>", "</tool_call>", "<tools>", "</tools>")
VOCABULARY = 2048
CONTEXT = 2048
FUNCTION_WORDS = (
    "a about after again all also always an and any are as at away be been before both but by called came can "
    "cannot come could did do does down each every first for from get gets give given go had has have he help her "
    "here him his how i if in into is it its just know last let like likes live lives long look made make many "
    "may me more most much must my named need never next no nobody not now of off old on once one only or other "
    "our out over own please put said saw say see she should so some that the their them then there these they "
    "this those to together too under up use very was we well went were what when where which while who will with "
    "would you your"
)
PATTERN = "|".join(
    (
        r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})",
        r" (?:" + FUNCTION_WORDS.replace(" ", "|") + r")(?![\p{L}\p{N}_'-])",
        r"\p{L}+",
        r"\p{N}",
        r"[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)* ?",
        r"\n+",
        r"\s",
    )
)


def texts(seed: int, count: int) -> Iterator[str]:
    """The text between added tokens in rendered training examples."""
    added = re.compile("|".join(map(re.escape, (*CONTROL, *VISIBLE))))
    for example in itertools.islice(stream(seed, WEIGHTS), count):
        yield from added.split(render(example.messages, example.tools))


def train(count: int, seed: int) -> Tokenizer:
    """A tokenizer trained on the generator's text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[
            *(AddedToken(token, special=True, normalized=False) for token in CONTROL),
            *(AddedToken(token, special=True, normalized=False) for token in VISIBLE),
        ],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(seed, count), trainer)
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(document))


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    names = {"bos_token": END_OF_TEXT, "eos_token": IM_END, "pad_token": END_OF_TEXT}
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token in CONTROL,
        }
        for token in (*CONTROL, *VISIBLE)
    }  # fmt: skip
    config = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "added_tokens_decoder": added,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (directory / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n")


def main() -> None:
    """Train the tokenizer on the generator's text and write it into a model directory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("weft/assets/weft-tiny"), help="model directory")
    parser.add_argument("--examples", type=int, default=30000, help="examples to train on")
    parser.add_argument("--seed", type=int, default=17, help="seed of the examples")
    args = parser.parse_args()
    tokenizer = train(args.examples, args.seed)
    write(tokenizer, args.out)
    sample = list(texts(99, 500))
    tokens = sum(len(tokenizer.encode(text).ids) for text in sample)
    print(f"{tokenizer.get_vocab_size()} tokens, {sum(map(len, sample)) / tokens:.2f} characters per token")


if __name__ == "__main__":
    main()
