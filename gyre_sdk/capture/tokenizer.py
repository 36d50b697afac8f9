"""A tokenizer and chat template from a model folder, without transformers.

`FolderTokenizer` offers what `renderers` asks of a tokenizer and what templates ask of their surroundings.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gyre_sdk.errors import ConfigError


class FolderTokenizer:
    """`tokenizer.json` (+ `tokenizer_config.json`, `chat_template.jinja`, `config.json`) of a model folder.

    Raises ConfigError, naming the file, when something is missing or unreadable.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        from tokenizers import Tokenizer

        self.folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder}: no tokenizer.json; a fast tokenizer is needed (is this a model folder?)")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for anything wrong in the file
            raise ConfigError(f"{path} can't be read as a tokenizer: {error}") from error
        self.config = _json(folder / "tokenizer_config.json")
        self.model_config = _json(folder / "config.json")
        self.name_or_path = name or str(
            self.config.get("name_or_path") or self.model_config.get("_name_or_path") or folder
        )
        self.vocab_size = max(
            self._tokenizer.get_vocab_size(with_added_tokens=True),
            _text_config(self.model_config).get("vocab_size") or 0,
        )
        self.eos_token = _token(self.config.get("eos_token"))
        self.eos_token_id = self._id(self.eos_token)
        self.unk_token_id = self._id(_token(self.config.get("unk_token")))
        self.added = {token.content: id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items()}
        self.all_special_tokens = [
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        ]
        self.chat_template = self._find_template()
        self._compiled: Any = None

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _find_template(self) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default") or next(iter(named.values()), None)
        return template if isinstance(template, str) else None

    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn: eos of the tokenizer and of the generation config."""
        generation = _json(self.folder / "generation_config.json").get("eos_token_id")
        listed = generation if isinstance(generation, list) else [generation]
        ids = [self.eos_token_id, *listed]
        return tuple(dict.fromkeys(id_ for id_ in ids if isinstance(id_, int)))

    def encode(self, text: str, *args: Any, add_special_tokens: bool = False, **kwargs: Any) -> list[int]:
        """Ids of a text; special tokens written in it become their ids, as in a rendered template."""
        # The batch call is the one that lets other threads run, and it does no work on offsets.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Any, *args: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(id_) for id_ in token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            found = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return (
            self._tokenizer.id_to_token(ids) if isinstance(ids, int) else [self._tokenizer.id_to_token(i) for i in ids]
        )

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size

    def template_text(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """The chat template, rendered. Raises ConfigError when the folder has none."""
        if self._compiled is None:
            if self.chat_template is None:
                raise ConfigError(f"{self.folder}: no chat template (chat_template.jinja or tokenizer_config.json)")
            self._compiled = _compile(self.chat_template)
        names = {key: _token(value) for key, value in self.config.items() if key.endswith("_token")}
        variables = {"tools": None, "documents": None, **{k: v for k, v in names.items() if v}, **variables}
        return str(self._compiled.render(messages=list(messages), **variables))

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """As in transformers, for `renderers.DefaultRenderer`."""
        text = self.template_text(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
        if not tokenize:
            return text
        ids = self.encode(text)
        return {"input_ids": ids} if return_dict else ids


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    return data if isinstance(data, dict) else {}


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _compile(source: str) -> Any:
    """Same environment as transformers gives templates: sandboxed, trimmed blocks, `tojson` that keeps unicode."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model says (for SFT masks); here it is just its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 wants a plain class attribute)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)
