"""A tokenizer that consists only of tokenizer.json and a chat template, read without transformers.

Importing transformers takes half a second, and transformers takes twice as long as this file to compose a prompt.
`read` opens the tokenizer in a folder only if transformers would give the same results. For all other folders,
data_gsm8k uses transformers.
"""

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

# tokenizer_config.json must contain SETTINGS, and may contain the texts of SPECIAL and a chat template. transformers
# acts on other keys.
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
# Other files that transformers would read.
OTHERS = {
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates",
}


class PlainTokenizer:
    """The part of transformers' PreTrainedTokenizerFast that we use, with the same results.

    ``inner`` is the Tokenizer of tokenizer.json. ``special`` maps the names of special tokens, such as eos_token, to
    their texts.
    """

    def __init__(self, name_or_path: str, inner: Any, special: dict[str, str], chat_template: str | None) -> None:
        self.name_or_path, self.inner, self.special, self.chat_template = name_or_path, inner, special, chat_template
        self.added_tokens_decoder = inner.get_added_tokens_decoder()
        self.eos_token = special.get("eos_token")
        self.eos_token_id, self.pad_token_id = (
            inner.token_to_id(special[name]) if name in special else None for name in ("eos_token", "pad_token")
        )

    def __len__(self) -> int:
        return self.inner.get_vocab_size()

    def __call__(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> dict[str, Any]:
        self.inner.encode_special_tokens = split_special_tokens
        return {"input_ids": self.inner.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(ids, skip_special_tokens=False)

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool, **variables: Any) -> str:
        return _compiled(self.chat_template).render(
            self.special | variables, messages=messages, tools=None, documents=None
        )


def read(folder: Path, files: Collection[str], settings: Mapping[str, Any]) -> PlainTokenizer | None:
    """Open the tokenizer in ``folder``, or return None if transformers has to read it.

    ``files`` are the names of the files in the folder. ``settings`` is the content of tokenizer_config.json.
    """
    texts = {name: settings[name] for name in (*SPECIAL, "chat_template") if isinstance(settings.get(name), str)}
    # The template tag {% generation %} exists only in transformers.
    if SETTINGS | texts != settings or OTHERS & set(files) or "endgeneration" in texts.get("chat_template", ""):
        return None
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    flagged = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    special = {name: texts[name] for name in SPECIAL if name in texts}
    is_whole = flagged.issuperset(special.values()) and not inner.padding and not inner.truncation
    return PlainTokenizer(str(folder), inner, special, texts.get("chat_template")) if is_whole else None


@functools.cache
def _compiled(chat_template: str) -> Any:
    """Compile a chat template in a Jinja environment with the same settings as that of transformers."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(chat_template)


def _raise(message: str) -> None:
    raise ValueError(message)
